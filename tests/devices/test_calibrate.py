import random

import pytest
import torch

from tightfit.devices import calibrate as module
from tightfit.devices.calibrate import calibrate, fit_product
from tightfit.devices.calls import (
    MOST_TURNS,
    POOL,
    Buffers,
    ProductCase,
    StreamCase,
    Turn,
    attention_call,
    attention_cases,
    product_call,
    product_cases,
    stream_call,
    stream_cases,
)
from tightfit.devices.families import STREAM_UNITS, Family
from tightfit.devices.timing import fastest
from tightfit.errors import DeviceError


def test_the_coefficients_of_a_product_are_found_again():
    truth = (2e-12, 5e-11, 0.0, 3e-10, 4e-6)
    sides = [(32, 32, 32), (512, 64, 1024), (64, 512, 1024), (1024, 512, 64), (300, 200, 100), (1000, 1000, 1000)]
    cases = [ProductCase("nn", torch.float32, batch, *mnk) for mnk in sides for batch in (1, 3)]
    seconds = [
        batch * (truth[0] * m * n * k + truth[1] * m * n + truth[2] * m * k + truth[3] * n * k) + truth[4]
        for _, _, batch, m, n, k in cases
    ]
    assert fit_product(cases, seconds) == pytest.approx(truth, rel=1e-6, abs=1e-20)


def test_no_coefficient_is_ever_below_zero():
    draw = random.Random(0)
    cases = [ProductCase("nn", torch.float32, 1, 2**i, 2**j, 2**k) for i in (5, 9) for j in (5, 9) for k in (5, 9)]
    for _ in range(20):
        assert min(fit_product(cases, [draw.uniform(1e-6, 1e-3) for _ in cases])) >= 0


def test_every_stream_family_has_a_representative_that_runs():
    buffers = Buffers.on(torch.device("cpu"))
    tried = set()
    with torch.no_grad():
        for case in stream_cases("cpu"):
            if case.elements <= 2**15:
                stream_call(case, buffers)()
                tried.add(case.family)
    assert tried == set(STREAM_UNITS)


def test_products_and_attention_of_every_kind_run():
    buffers = Buffers.on(torch.device("cpu"))
    smallest = {(case.kind, case.dtype): case for case in product_cases("cpu") if case.rows <= 32}
    short = [case for case in attention_cases("cpu") if case.length == 128 and case.width == 32]
    assert len(smallest) == 4 * 3 + 2
    assert len(short) == 2 * 2 * 2
    with torch.no_grad():
        for case in smallest.values():
            product_call(case, buffers)()
        for case in short:
            attention_call(case, buffers)()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_call_has_other_operands_than_the_call_before(dtype):
    buffers = Buffers.on(torch.device("cpu"))
    seen = []
    call = buffers.in_turns(lambda turn: lambda: seen.append(_addresses(turn, dtype)))
    for _ in range(MOST_TURNS):
        call()
    assert len(set(seen)) == POOL // (512 * 512)  # turns until the pool is through
    operands = [address for turn in set(seen) for address in turn]
    assert len(set(operands)) == 2 * len(set(seen))  # both sides are read in turns, and what is written lies apart
    call()
    assert seen[-1] == seen[MOST_TURNS % len(set(seen))]


def _addresses(turn, dtype):
    read, right, out = (turn.get((512, 512), dtype, use) for use in ("read", "right", "out"))
    assert len({read.data_ptr(), right.data_ptr(), out.data_ptr()}) == 3
    return read.data_ptr(), out.data_ptr()


def test_operands_that_fill_the_pool_are_the_same_each_time():
    buffers = Buffers.on(torch.device("cpu"))
    turn = Turn(buffers, 5)
    assert turn.get((POOL,), torch.float32).data_ptr() == buffers.get((POOL,), torch.float32).data_ptr()
    assert turn.turns == 1


def test_a_mixed_stream_reads_two_widths():
    from tightfit.devices.calls import stream_bytes

    assert stream_bytes(StreamCase(Family.ARITHMETIC, torch.float32, torch.bfloat16, 10)) == 10 * (4 + 4 + 2)


def test_calls_are_timed_for_at_least_two_rounds():
    counts = {"a": 0, "b": 0}

    def call(key):
        counts[key] += 1
        sum(range(200_000))  # longer than is repeated within one round

    seconds = fastest({key: lambda key=key: call(key) for key in counts}, "cpu", 0.0, 5)
    assert seconds.keys() == counts.keys()
    assert min(seconds.values()) > 0
    assert min(counts.values()) >= 4  # two to warm up, one a round


def test_an_absent_gpu_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        calibrate("cuda")


@pytest.mark.slow  # measures this machine for several seconds
def test_a_calibration_gives_finite_figures_and_leaves_the_users_generator_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)
    state = torch.get_rng_state()
    spec = calibrate("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    spec.to_json(tmp_path / "spec.json")
    assert module.DeviceSpec.from_json(tmp_path / "spec.json") == spec
    assert {key.partition("/")[0] for key in spec.streams} == {str(family) for family in STREAM_UNITS}


def test_where_launches_hide_behind_work_no_product_is_faster_than_the_fastest_that_was_seen():
    """An H200: 800 TFLOP/s in bf16, and a host that takes 15 microseconds for a launch."""

    def taken(case: ProductCase) -> float:
        return max(15e-6, 4e-6 + 2 * case.rows * case.columns * case.inner / 800e12)

    cases = [case for case in product_cases("cuda") if case.kind == "nt" and case.dtype == torch.bfloat16]
    larger = ProductCase("nt", torch.bfloat16, 1, 8192, 128_256, 4096)
    terms = (larger.rows * larger.columns * larger.inner, larger.rows * larger.columns,
             larger.rows * larger.inner, larger.columns * larger.inner, 1)  # fmt: skip

    def predicted(**how: bool) -> float:
        coefficients = fit_product(cases, [taken(case) for case in cases], **how)
        return sum(c * term for c, term in zip(coefficients, terms, strict=True))

    assert predicted(launched=True) == pytest.approx(taken(larger), rel=0.05)
    assert predicted() < 0.9 * taken(larger)
