"""`tightfit.diagnose`, from each kind of subject."""

import json

import pytest
import torch

import tightfit
from memory_snapshots import MIB, snapshot
from tightfit.errors import InputError
from tightfit.planner.levers import lever_types
from tightfit.step import model_loss
from tightfit.tracing.record import StepTrace
from tightfit.training.config import load_config
from tiny import allocator_peak, decoder, token_batch

pytestmark = [  # of blocks that are compiled, as a remedy
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

GIB = 2**30


def out_of_memory(free="1.50 GiB", idle="1.25 GiB", allocated="65.00 GiB"):
    return torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
        f"{free} is free. Including non-PyTorch memory, this process has 67.65 GiB memory in use. Of the allocated "
        f"memory {allocated} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated."
    )


def raised_by(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


class Square(torch.autograd.Function):
    """Asks in backward for more than any machine has."""

    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.empty(10**15)


class Greedy(torch.nn.Module):
    def __init__(self, *, forward):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.in_forward = forward

    def forward(self, x):
        return torch.empty(10**15) if self.in_forward else Square.apply(x * self.weight)


def test_an_error_alone_tells_what_it_says_and_what_would_tell_more():
    found = tightfit.diagnose(out_of_memory())
    assert (found.requested_bytes, found.fragmentation_bytes) == (2 * GIB, int(1.25 * GIB))
    assert found.limit_bytes == 65 * GIB + int(1.25 * GIB) + int(1.5 * GIB)
    assert "this is fragmentation" in str(found)
    assert any("expandable_segments:True" in line for line in found.advice)
    assert any("tightfit profile" in line for line in found.advice)
    assert found.remedies
    assert all(remedy.saved_bytes is remedy.fits is None for remedy in found.remedies)


def test_memory_that_would_not_do_in_one_piece_is_not_called_fragmentation():
    found = tightfit.diagnose(out_of_memory(free="10.00 MiB", idle="20.00 MiB"))
    assert not any("fragmentation" in line for line in (*found.findings, *found.advice))


def test_the_traceback_tells_phase_and_module():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Greedy(forward=True))
    found = tightfit.diagnose(raised_by(lambda: model(torch.ones(2))))
    assert (found.phase, found.module) == ("forward", "1")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Greedy(forward=False))
    found = tightfit.diagnose(raised_by(lambda: model(torch.ones(2)).sum().backward()))
    assert found.phase == "backward"


def test_an_error_of_another_kind_is_refused():
    with pytest.raises(InputError, match="ValueError is no out-of-memory error: bad luck"):
        tightfit.diagnose(ValueError("bad luck"))


@pytest.fixture(scope="module")
def remedied():
    """An error, with the model at hand, and less memory than the plain step takes."""
    model, batch = decoder(), token_batch()
    limit = int(0.7 * tightfit.estimate(model, batch).peak_bytes)
    return tightfit.diagnose(out_of_memory("0 bytes", "0 bytes", f"{limit} bytes"), model=model, batch=batch)


@pytest.mark.keeps("bytes-doctor-remedies-real")
@pytest.mark.slow  # every remedy is priced, and each runs
def test_remedies_have_the_bytes_of_the_real_step(remedied):
    by_name = {remedy.name: remedy for remedy in remedied.remedies}
    plain = allocator_peak(decoder(), token_batch())
    assert remedied.expected_bytes == plain

    everything, model = by_name["recompute all 3 blocks"], decoder()
    tightfit.recompute(model, "layers.*")
    assert everything.peak_bytes == allocator_peak(model, token_batch())
    assert everything.saved_bytes == plain - everything.peak_bytes > 0
    assert everything.added_seconds > 0
    assert everything.python == 'tightfit.recompute(model, "layers.*")'

    two = by_name["2 micro-batches"]
    assert two.peak_bytes == pytest.approx(allocator_peak(decoder(), token_batch(), micro_batches=2), rel=1e-3)


@pytest.mark.slow  # every remedy is priced
def test_remedies_that_fit_come_first_the_quickest_at_the_head(remedied):
    fits = [remedy.fits for remedy in remedied.remedies]
    assert True in fits
    assert fits == sorted(fits, reverse=True)
    assert all(remedy.fits == (remedy.peak_bytes < remedied.limit_bytes) for remedy in remedied.remedies)
    seconds = [r.added_seconds for r in remedied.remedies if r.fits and r.exactness != "inexact"]
    assert seconds == sorted(seconds)
    assert any(remedy.name.startswith("a plan for") for remedy in remedied.remedies)


@pytest.mark.slow  # every remedy is priced
def test_without_a_limit_the_largest_saving_comes_first():
    found = tightfit.diagnose(tightfit.estimate(decoder(), token_batch()), model=decoder(), batch=token_batch())
    saved = [remedy.saved_bytes for remedy in found.remedies]
    assert saved == sorted(saved, reverse=True)
    assert {remedy.fits for remedy in found.remedies} == {None}


@pytest.mark.keeps("bytes-doctor-remedies-real")
@pytest.mark.slow  # each remedy is used, compiled blocks among them
def test_the_lines_of_python_run_as_they_stand(remedied):
    for remedy in remedied.remedies:
        names = {"tightfit": tightfit, "torch": torch, "model": decoder(), "batch": token_batch()}
        exec(remedy.python + (" pass" if remedy.python.endswith(":") else ""), names)
        if "compile_blocks" not in remedy.python:  # a minute of C++, which tests/levers/test_compiled.py takes
            model_loss(names["model"], names["batch"]).backward()


@pytest.mark.keeps("bytes-doctor-remedies-real")
@pytest.mark.slow  # every remedy is priced
def test_the_lines_of_yaml_are_keys_of_the_configuration(remedied, tmp_path):
    for remedy in remedied.remedies:
        path = tmp_path / "training.yaml"
        path.write_text(remedy.yaml)
        load_config(str(path), ())


@pytest.mark.slow  # every remedy is priced
def test_every_lever_is_offered_and_other_optimizers_too(remedied):
    names = " ".join(remedy.name for remedy in remedied.remedies)
    offers = (
        "recompute all",
        "micro-batches",
        "chunked loss",
        "tiles",
        "offload all",
        "blocks compiled",
        "blocks streamed",
        "adafactor",
        "adapters",
    )
    assert [word for word in offers if word not in names] == [], remedied.advice
    assert "low-rank adapters" in names
    assert len(lever_types()) == 8, "a suggestion of the new lever belongs above (capture saves time and has none)"


def test_a_model_without_blocks_head_or_rows_to_split_is_offered_other_optimizers_alone():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    found = tightfit.diagnose(
        tightfit.estimate(model, (torch.ones(1, 8),), loss=lambda m, b: m(*b).sum()),
        model=model,
        batch=(torch.ones(1, 8),),
        loss=lambda m, b: m(*b).sum(),
        precision="bf16",
    )
    names = {remedy.name for remedy in found.remedies}
    assert {name for name in names if not name.startswith("optimizer ")} <= {"step in backward"}
    assert found.expected_bytes > 0


@pytest.mark.keeps("bytes-doctor-remedies-real")
def test_a_remedy_that_makes_the_optimizer_anew_has_the_bytes_of_the_one_that_its_lines_make():
    """The user's own optimizer holds more: a third state, which the lines do not ask for."""
    model, batch = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4))), (torch.ones(1, 64),)
    own = torch.optim.AdamW(model.parameters(), amsgrad=True)
    found = tightfit.diagnose(
        tightfit.estimate(model, batch, loss=squares), model=model, batch=batch, loss=squares, optimizer=own
    )
    remedy = next(remedy for remedy in found.remedies if remedy.name == "step in backward")
    names = {"model": model}
    exec(remedy.python, names)
    step = {"loss": squares, "optimizer": names["optimizer"]}
    assert remedy.peak_bytes == tightfit.estimate(model, batch, **step).peak_bytes


def squares(model, batch):
    return model(*batch).square().sum()


def watched(model, batch, loss):
    """A monitor of three steps, and their optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())
    with tightfit.monitor(model, optimizer) as watch:
        for _ in range(3):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch, optimizer


@pytest.mark.slow  # a training that is watched
def test_a_watch_is_compared_with_what_was_expected():
    model, batch = decoder(), token_batch()
    watch, optimizer = watched(model, batch, model_loss)
    found = tightfit.diagnose(watch, model=model, batch=batch, optimizer=optimizer)
    assert found.peak_bytes == found.expected_bytes == watch.peak_bytes
    assert (found.phase, found.category) == ("backward", "activations")
    assert any("+0.00%" in line for line in found.findings)
    assert found.holders[0].bytes == max(watch.by_module.values())


@pytest.mark.slow  # two diagnoses with their remedies
def test_a_watch_of_another_model_is_said_to_be_one():
    model, batch = torch.nn.Linear(4, 4), (torch.ones(2, 4),)
    watch, optimizer = watched(model, batch, squares)
    own = tightfit.diagnose(watch, model=model, batch=batch, loss=squares, optimizer=optimizer)
    assert not any("parameters differ" in line for line in own.findings)
    other = tightfit.diagnose(watch, model=decoder(), batch=token_batch())
    assert any("The parameters differ: 80 B measured" in line for line in other.findings)


def test_estimates_plans_and_traces_are_diagnosed():
    model, batch = decoder(), token_batch()
    estimate, plan = tightfit.estimate(model, batch), tightfit.plan(model, batch, "0.8x")
    found = tightfit.diagnose(estimate)
    assert (found.peak_bytes, found.phase) == (estimate.peak_bytes, estimate.peak_phase)
    found = tightfit.diagnose(plan)
    assert found.limit_bytes == plan.budget_bytes
    assert "the plan saves" in str(found)
    with pytest.raises(InputError, match="the trace is empty"):
        tightfit.diagnose(StepTrace((), (), (), (), (), ()))


def test_a_snapshot_is_diagnosed():
    found = tightfit.diagnose(snapshot())
    assert (found.phase, found.requested_bytes) == ("optimizer", 64 * MIB)
    assert found.peak_bytes == 65 * MIB
    assert "this is fragmentation" in str(found)
    assert found.holders[0].name == "model.py:12 forward ×2 (forward)"


@pytest.mark.parametrize(("subject", "said"), [(3, "a int cannot be diagnosed"), ({}, "not a CUDA memory snapshot")])
def test_anything_else_is_refused(subject, said):
    with pytest.raises(InputError, match=said):
        tightfit.diagnose(subject)


@pytest.mark.slow  # every remedy is priced
def test_a_diagnosis_is_written_as_json(remedied, tmp_path):
    remedied.to_json(tmp_path / "diagnosis.json")
    raw = json.loads((tmp_path / "diagnosis.json").read_text())
    assert [remedy["name"] for remedy in raw["remedies"]] == [remedy.name for remedy in remedied.remedies]
