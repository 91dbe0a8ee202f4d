"""What tightfit runs for itself in the middle of a training (dry runs, comparisons, calibrations) is no step of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
import tightfit.errors
from round_device import round_device
from tightfit.devices.own_time import own_time
from tightfit.runtime.outside import outside, outside_training
from tightfit.runtime.simulation import simulation
from tightfit.step import model_loss
from tightfit.training.monitoring.record import Record
from tiny import decoder, token_batch

ROOT = Path(__file__).parents[2]
BATCH = token_batch(2, 48)


def small():
    return decoder(num_layers=2, hidden_size=32)


def planned(model, optimizer):
    return tightfit.plan(model, BATCH, "0.8x", optimizer=optimizer, device=round_device())


def estimated(model, optimizer):
    return tightfit.estimate(model, BATCH, optimizer=optimizer, device=round_device())


def verified(model, optimizer):
    assert tightfit.verify(model, BATCH, planned(model, optimizer)).ok


def another_model_planned(model, optimizer):
    other = small()
    planned(other, torch.optim.AdamW(other.parameters()))


def in_another_thread(model, optimizer):
    thread = threading.Thread(target=another_model_planned, args=(model, optimizer))
    thread.start()
    thread.join()


def refused(model, optimizer):
    with pytest.raises(tightfit.errors.CannotFit):
        tightfit.plan(model, BATCH, "0.01x", optimizer=optimizer, device=round_device())


def blocks_timed(model, optimizer):
    with outside_training():  # as a calibration does it
        own_time(rounds=1)


QUESTIONS = (planned, estimated, verified, in_another_thread, refused, blocks_timed)
PLACES = ("before", "forward", "backward", "optimizer", "zero_grad")


def watched(ask=None, where="before", at=(0, 1)):
    """Three steps of a loop that asks tightfit something in its middle."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    with tightfit.monitor(model, optimizer) as watch:
        for step in range(3):
            for place in PLACES:
                if ask is not None and place == where and step in at:
                    ask(model, optimizer)
                if place == "forward":
                    loss = model_loss(model, BATCH)
                elif place == "backward":
                    loss.backward()
                elif place == "optimizer":
                    optimizer.step()
                    losses.append(loss.item())
                    del loss
                elif place == "zero_grad":
                    optimizer.zero_grad()
    return watch.record(), watch.trace, losses


def seen(record, trace):
    """All that a record says of the training, seconds and resident memory aside."""
    figures = (record.steps, record.peak_bytes, record.by_category, record.by_module, record.phase_peaks)
    operators = [(operator.name, operator.phase, operator.module) for operator in trace.operators]
    return *figures, record.model, record.optimizer, record.complete, record.traced_step, trace.levels, operators


@pytest.fixture(scope="module")
def alone():
    record, trace, losses = watched()
    return seen(record, trace), losses


@pytest.mark.keeps("plans-estimates-comparisons-inside")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda ask: ask.__name__)
def test_what_is_asked_before_and_between_steps_is_no_step(ask, alone):
    record, trace, losses = watched(ask)
    assert (seen(record, trace), losses) == alone


@pytest.mark.keeps("plans-estimates-comparisons-inside")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", PLACES[1:])
def test_what_is_asked_within_a_step_is_no_part_of_it(where, alone):
    record, trace, losses = watched(verified, where, at=(1,))
    assert (seen(record, trace), losses) == alone


def test_the_time_of_what_ran_aside_is_not_the_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tightfit.training.monitoring.watch.time.perf_counter", lambda: clock[0])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with tightfit.monitor(model, optimizer, traced_step=None) as watch:
        for _ in range(3):
            model(torch.ones(2)).sum().backward()
            with outside_training():
                clock[0] += 1000.0
            clock[0] += 3.0
            optimizer.step()
    assert watch.record().step_seconds == 3.0


def test_a_plan_made_and_applied_within_the_loop_is_watched_at_its_predicted_peak():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with tightfit.monitor(model, optimizer) as watch:
        plan = planned(model, optimizer)
        plan.apply(model)
        for _ in range(3):
            model_loss(model, BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.steps == 3
    assert watch.peak_bytes == plan.peak_bytes


def test_two_monitors_of_one_loop_see_the_same(alone):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with tightfit.monitor(model, optimizer) as outer, tightfit.monitor(model, optimizer) as inner:
        for _ in range(3):
            model_loss(model, BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert (outer.steps, inner.steps) == (3, 3)
    assert inner.peak_bytes == alone[0][1] <= outer.peak_bytes


def test_nothing_of_what_ran_aside_is_left_on():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    with tightfit.monitor(model, optimizer):
        refused(model, optimizer)
        model_loss(model, BATCH).backward()
    assert (outside.depth, outside.callbacks) == (0, ())
    for tensor in (*model.parameters(), *BATCH.values()):
        assert not [key for key in tensor.untyped_storage().__dict__ if "dry" in key or "watch" in key]


def test_a_dry_run_in_one_thread_leaves_a_training_in_another_alone():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    dry, trained = threading.Event(), threading.Event()

    def loss(model, batch):
        dry.set()
        assert trained.wait(60)
        return model_loss(model, batch)

    other = small()
    arguments = {"loss": loss, "device": round_device()}
    thread = threading.Thread(target=tightfit.estimate, args=(other, BATCH), kwargs=arguments)
    with tightfit.monitor(model, optimizer) as watch:
        thread.start()
        assert dry.wait(60)
        for _ in range(2):
            assert not simulation.is_dry
            model_loss(model, BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.set()
        thread.join()
    assert watch.steps == 2


SCRIPT = """
import torch, tightfit
from round_device import round_device
from tiny import decoder, token_batch
from tightfit.step import model_loss

model, batch = decoder(num_layers=2), token_batch()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    if step in (0, 2):
        plan = tightfit.plan(model, batch, "0.8x", optimizer=optimizer, device=round_device())
        assert tightfit.verify(model, batch, plan).ok
    with plan.apply(model):
        model_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
print(plan.peak_bytes)
"""


# What torchrun tells the only rank of a run: an example of DDP asks for it. Port 0 is any that is free.
ONE_RANK = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def profiled(script, folder, **variables):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg", **variables}
    command = [sys.executable, "-c", "from tightfit.cli import main; main()", "profile", str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, Record.from_json(folder / f"{script.stem}-memory.json")


@pytest.mark.slow  # two interpreters; without a script the same is asked above
def test_a_script_that_plans_is_profiled_as_it_trains(tmp_path):
    script = tmp_path / "planning.py"
    script.write_text(SCRIPT)
    out, record = profiled(script, tmp_path)
    assert (record.model, record.optimizer, record.steps, record.complete) == ("Decoder", "AdamW", 4, True)
    assert record.peak_bytes == int(out)


# A reward is a function that a training calls.
TRAININGS = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "reward"]


@pytest.mark.slow  # each is a whole training in a process of its own
@pytest.mark.parametrize("path", TRAININGS, ids=lambda path: path.stem)
def test_every_example_can_be_profiled(path, tmp_path):
    _, record = profiled(path, tmp_path, **(ONE_RANK if path.stem == "ddp_loop" else {}))
    assert record.steps > 1
    assert record.failure is None


def test_a_backward_aside_is_no_part_of_the_training_in_autograds_own_thread_either(alone):
    def in_autograds_thread(model, optimizer):
        with (
            outside_training()
        ):  # the modes go along with autograd into its threads on CUDA; what Python keeps a thread does not
            loss = model_loss(model, BATCH)
            outside.depth -= 1
            try:
                torch.autograd.grad(loss, list(model.parameters()))
            finally:
                outside.depth += 1

    record, trace, losses = watched(in_autograds_thread, "backward", at=(1,))
    assert (seen(record, trace), losses) == alone
