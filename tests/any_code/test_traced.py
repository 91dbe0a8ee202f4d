"""`tightfit.trace`: any code has the peak that the allocator records, and leaves everything as it was."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from round_device import round_device
from tightfit.errors import InputError, ModelError, TraceError
from tightfit.memory.allocator import measured_peak
from tightfit.models.generation import generate
from tightfit.optim.by_name import state_tensors
from tightfit.units import format_bytes
from tiny import decoder, token_batch

ROUNDING = 64  # bytes: numbers that Python wraps
DEVICE = round_device()
WIDTH = 64

LIBRARY = torch.library.Library("tightfit_any_code", "DEF")  # an operator that has no shapes without data
LIBRARY.define("no_shapes(Tensor x) -> Tensor")
LIBRARY.impl("no_shapes", lambda x: x.clone(), "CPU")


def small_decoder():
    return decoder(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=600)


def trained(steps=0):
    """A model of many activations, its optimizer after some steps, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(512, WIDTH)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, x


class Case:
    """Code, its inputs, and the tensors that exist before it."""

    def __init__(self, function, inputs, resident):
        self.function, self.inputs, self.resident = function, inputs, [*resident]

    def measured(self):
        return measured_peak(lambda: self.function(*self.inputs), self.resident)


def one_operator():
    left, right = torch.randn(300, 300), torch.randn(300, 500)
    return Case(torch.matmul, (left, right), (left, right))


def a_forward():
    model, _, x = trained()
    return Case(model, (x,), (*model.parameters(), x))


def an_evaluation():
    model, batch = small_decoder(), token_batch(4, 64)

    @torch.inference_mode()
    def evaluate():
        return model(batch["input_ids"]).logits.float().log_softmax(-1).max()

    return Case(evaluate, (), (*model.parameters(), *model.buffers(), *batch.values()))


def a_generation():
    model, ids = small_decoder(), token_batch(2, 12)["input_ids"]
    resident = (*model.parameters(), *model.buffers(), ids)
    return Case(lambda: generate(model, ids, max_new_tokens=5, temperature=0), (), resident)


def a_loop_from_the_beginning():
    model, optimizer, x = trained()

    def loop():
        for _ in range(2):
            for half in x.chunk(2):  # whose gradients are kept from one to the other
                model(half).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return Case(loop, (), (*model.parameters(), x))


def a_step_that_finds_states_and_gradients():
    model, optimizer, x = trained(1)
    model(x).square().mean().backward()

    def step():
        model(x).square().mean().backward()
        optimizer.step()

    resident = (*model.parameters(), *(p.grad for p in model.parameters()), *state_tensors(optimizer), x)
    return Case(step, (), resident)


class Trainer:
    """A model that a function reaches through `self` only, and a tensor that is used late."""

    def __init__(self):
        self.parts = {"model": trained()[0]}
        self.late = torch.randn(400, WIDTH)

    def run(self, x):
        x = self.parts["model"](x)
        return x.sum() + self.parts["model"](self.late[:8]).sum()


def a_method():
    trainer, x = Trainer(), torch.randn(256, WIDTH)
    return Case(trainer.run, (x,), (*trainer.parts["model"].parameters(), trainer.late, x))


def levels(found):
    """Bytes in use along the timeline."""
    return [sum(at_once) for at_once in zip(*found.timeline.values(), strict=True)]


CASES = [
    one_operator, a_forward, an_evaluation, a_generation, a_loop_from_the_beginning,
    a_step_that_finds_states_and_gradients, a_method,
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.keeps("tightfit-trace-predicts-allocator")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_peak_of_any_code_is_the_allocators(make):
    case = make()
    found = tightfit.trace(case.function, *case.inputs, device=DEVICE)
    assert abs(found.peak_bytes - case.measured()) <= ROUNDING
    assert sum(found.by_category.values()) == found.peak_bytes == max(levels(found))
    assert found.step_seconds > 0


@pytest.mark.keeps("tightfit-trace-predicts-allocator")
@pytest.mark.parametrize("device", [DEVICE, "rtx4090"], ids=["cpu", "card"])
def test_a_traced_loop_of_two_steps_has_the_peak_that_estimate_predicts(device):
    model, optimizer, x = trained()

    def loop():
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    expected = tightfit.estimate(
        model, (x,), loss=lambda model, batch: model(*batch).square().mean(), optimizer=optimizer, device=device
    )
    found = tightfit.trace(loop, device=device)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.001)
    assert (found.peak_phase, found.peak_module) == (expected.peak_phase, expected.peak_module)
    assert found.by_category["parameters"] == expected.by_category["parameters"]
    assert found.phase_peaks.keys() == expected.step_figures.phase_peaks.keys()
    assert found.phase_peaks["optimizer"] == pytest.approx(expected.step_figures.phase_peaks["optimizer"], rel=0.01)


@pytest.mark.parametrize("device", [DEVICE, "rtx4090"], ids=["cpu", "card"])
def test_a_first_step_says_that_later_ones_begin_with_its_states(device):
    model, _, x = trained()
    optimizer = torch.optim.AdamW(model.parameters())

    def loop(steps):
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, later = (tightfit.trace(loop, steps, device=device) for steps in (1, 2))
    counts = 4 * len(list(model.parameters()))  # of steps, which a card keeps on the host
    made = 2 * sum(p.nbytes for p in model.parameters()) + (counts if device is DEVICE else 0)
    assert f"first step made {format_bytes(made)} of states" in " ".join(first.assumptions)
    assert later.peak_bytes > first.peak_bytes
    assert "states" not in " ".join(later.assumptions)


def test_states_that_code_finds_on_a_card_are_there_from_its_beginning():
    model, optimizer, x = trained(1)
    states = sum(t.nbytes for t in state_tensors(optimizer))

    def step():
        with torch.no_grad():
            model(x)
        optimizer.step()

    assert min(levels(tightfit.trace(step, device="rtx4090"))) > states


def test_a_card_runs_its_own_kernels():
    """Attention on a card never has the matrix of its scores."""
    q, k, v = (torch.randn(2, 8, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    found = tightfit.trace(F.scaled_dot_product_attention, q, k, v, device="rtx4090", is_causal=True)
    assert found.by_category["inputs"] == 3 * q.nbytes
    assert q.nbytes < found.by_category["workspace"] < 2 * 8 * 512 * 512 * q.itemsize


class Meddling(nn.Module):
    """Changes in forward what a dry run must not leave changed."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.seen.append(x)
        return self.linear(self.norm(x)).square().mean()


STEPS_DONE = 0


@pytest.mark.keeps("changes-nothing-code-reach")
def test_nothing_of_the_callers_is_changed():
    model, x, losses, calls = Meddling(), torch.randn(16, 8), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(x).backward()
    optimizer.step()
    scheduler.step()

    def meddle():
        nonlocal calls
        global STEPS_DONE
        STEPS_DONE += 1
        calls += 1
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        for _ in range(2):
            loss = model(x) + random.random() + numpy.random.rand() + torch.rand(1).sum()
            loss.backward()
            losses.append(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        x.mul_(2)
        model.eval().half().requires_grad_(False)

    gradients: dict[str, Any] = {n: (p.grad, copy.deepcopy(p.grad)) for n, p in model.named_parameters()}
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), x])
    tensors = [*model.parameters(), *model.buffers(), x]
    versions, flags = [t._version for t in tensors], [t.requires_grad for t in tensors]
    generators = torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state())
    tightfit.trace(meddle, device=DEVICE)
    assert (model.calls, len(model.seen), model.training, losses, calls, STEPS_DONE) == (1, 1, True, [], 0, 0)
    after = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), x]
    assert_same(before, after)
    assert all(p.grad is gradients[n][0] and torch.equal(*gradients[n]) for n, p in model.named_parameters())
    assert versions == [t._version for t in tensors]
    assert flags == [t.requires_grad for t in tensors]
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (random.getstate(), repr(numpy.random.get_state()))


def assert_same(one, other):
    """Equal structures with equal bits."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


def checksum(model):
    return [p.double().sum().item() for p in model.parameters()]


@pytest.mark.keeps("changes-nothing-code-reach")
def test_a_block_is_recorded_and_what_it_made_is_on_meta_afterwards():
    model, optimizer, x = trained()

    def the_same():
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return out.shape, loss.item(), nn.Linear(WIDTH, 20 * WIDTH)

    expected, losses, untouched = tightfit.trace(the_same, device=DEVICE), [], checksum(model)
    with tightfit.trace(device=DEVICE) as found:
        out = model(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        inner = nn.Linear(WIDTH, 20 * WIDTH)
        with pytest.raises(InputError, match="after its block"):
            _ = found.peak_bytes
    assert found.peak_bytes == expected.peak_bytes
    assert (found.peak_phase, losses, list(optimizer.state)) == ("backward", [], [])
    assert checksum(model) == untouched
    assert all(p.grad is None for p in model.parameters())
    assert (loss.is_meta, out.is_meta, out.shape) == (True, True, x.shape)
    assert inner.weight.is_meta
    assert not any(t.is_meta for t in (x, *model.parameters()))
    assert any("was assumed 1.0" in line for line in found.assumptions)
    with pytest.raises(InputError, match="has run already"), found:
        pass


@pytest.mark.keeps("code-own-exceptions-come")
def test_an_exception_of_the_code_comes_through_and_everything_is_put_back():
    model, _, x = trained()
    raised = KeyError("the user's own")

    def fail():
        model(x).sum().backward()
        raise raised

    with pytest.raises(KeyError) as caught:
        tightfit.trace(fail, device=DEVICE)
    with pytest.raises(KeyError) as caught_outside, tightfit.trace(device=DEVICE):
        fail()
    assert [caught.value, caught_outside.value] == [raised, raised]
    assert all(p.grad is None for p in model.parameters())
    assert torch.isfinite(model(x)).all()  # no dry run is left behind


def without_memory(kind):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32))
    if kind == "meta":
        return model.to("meta"), torch.zeros(4, 8, dtype=torch.int64, device="meta")
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32)), torch.zeros(4, 8, dtype=torch.int64)


@pytest.mark.keeps("changes-nothing-code-reach")
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_modules_and_inputs_without_memory_are_traced_and_stay_without(kind):
    real = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32))
    expected = tightfit.trace(real, torch.zeros(4, 8, dtype=torch.int64), device=DEVICE).peak_bytes
    model, ids = without_memory(kind)
    before = [type(t) for t in (*model.parameters(), ids)], [t.device for t in (*model.parameters(), ids)]
    assert tightfit.trace(model, ids, device=DEVICE).peak_bytes == expected
    assert before == ([type(t) for t in (*model.parameters(), ids)], [t.device for t in (*model.parameters(), ids)])


def test_a_question_about_unknown_numbers_is_answered_with_its_line():
    x = torch.randn(300, 300)

    def asks():
        assert not (x @ x).max() > 0
        assert (x @ x).sum().item() == 1.0

    found = tightfit.trace(asks, device=DEVICE)
    assert all("test_traced.py" in line for line in found.assumptions)
    assert [line.rpartition("assumed ")[2] for line in found.assumptions] == ["False", "1.0"]


@pytest.mark.keeps("code-own-exceptions-come")
def test_an_operator_that_cannot_run_dry_is_named_in_one_line():
    x = torch.randn(300, 300)
    with pytest.raises(TraceError, match=r"no_shapes.* cannot be run dry") as told:
        tightfit.trace(torch.ops.tightfit_any_code.no_shapes, x, device=DEVICE)
    assert "\n" not in str(told.value)


def a_compiled_function():
    """What `torch.compile` returns, as far as it is looked at; the compiler itself takes seconds to load."""

    def function(x):
        return x + 1

    function._torchdynamo_orig_callable = function
    return function


@pytest.mark.keeps("code-own-exceptions-come")
@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        (lambda: ((3,), {}), InputError, "function is a int, wanted a callable"),
        (lambda: ((), {"x": 1}), InputError, "inputs and no function"),
        (lambda: ((lambda: 3,), {}), InputError, "ran no operator"),
        (lambda: ((a_compiled_function(), torch.ones(2)), {}), InputError, "compiled by torch.compile"),
        (lambda: ((nn.DataParallel(nn.Linear(2, 2)), torch.ones(2)), {}), ModelError, "does not support DataParallel"),
        (lambda: ((lambda: tightfit.trace(torch.neg, torch.ones(2)),), {}), InputError, "another dry run"),
    ],
)  # fmt: skip
def test_misuse_is_one_line(arguments, kind, expected):
    args, keywords = arguments()
    with pytest.raises(kind, match=expected) as told:
        tightfit.trace(*args, device=DEVICE, **keywords)
    assert "\n" not in str(told.value)


def test_the_answer_is_a_short_table_and_json(tmp_path):
    model, _, x = trained()
    found = tightfit.trace(model, x, device="rtx4090")
    text = str(found)
    assert text.startswith("Sequential: Sequential with 33.2K parameters, RTX 4090\nPeak ")
    assert re.search(r"The peak is in forward, [23], (addmm|native_layer_norm)\.", text)  # cuBLAS's scratch decides
    assert len(text.splitlines()) < 25
    found.to_json(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    assert (written["peak_bytes"], written["step_seconds"]) == (found.peak_bytes, found.step_seconds)
    assert written["timeline"] == {category: list(levels) for category, levels in found.timeline.items()}


def test_the_code_of_the_page_runs_and_prints_what_it_shows(capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "any_code.md").read_text("utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/any_code.md", "exec"), names)
    shown, printed = re.findall(r"^```\n(.*)\n(Peak) ", page, re.MULTILINE), capsys.readouterr().out.splitlines()
    assert shown == [(printed[0], printed[1].split()[0])]  # the bytes differ between releases of PyTorch
    assert names["loss"].is_meta
