"""What PyTorch and the executor take of a CPU for an operator, beside its kernel."""

import random
from dataclasses import astuple

import pytest
import torch

from tightfit.devices import own_time as own_time_module
from tightfit.devices.own_time import own_time
from tightfit.levers.captured import capture_paths
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.recompute import recompute
from tightfit.step import model_loss
from tightfit.tracing.record import Phase
from tightfit.tracing.recording import ExecutorCost
from tightfit.tracing.step import trace_step
from tiny import decoder, token_batch


class Clock:
    """Seconds that are known, in the place of measured ones: those of a forward and a backward, plain and recomputed,
    of each kernel, and of captured blocks. Which operators run is as it is.
    """

    def __init__(self, monkeypatch, forward, backward, kernel, captured=(0.0, 0.0)):
        self.plain_operators = self.replayed_operators = 0
        clock = self

        class Blocks(own_time_module._Blocks):
            def timed(self):
                assert min(super().timed()) > 0
                if self.lever is capture_paths:
                    return captured
                return forward[self.lever is not None], backward[self.lever is not None]

            def kernels(self):
                found = super().kernels()
                found.seconds = {again: kernel * count for again, count in found.counts.items()}
                if self.lever is not None:
                    clock.replayed_operators = found.counts[True]
                else:
                    clock.plain_operators = found.counts[False]
                return found

        monkeypatch.setattr(own_time_module, "_Blocks", Blocks)


def test_what_a_step_takes_beside_its_kernels_is_shared_out_over_its_operators(monkeypatch):
    """Steps of known seconds: a millisecond for each kernel, and so much more for what is measured."""
    clock = Clock(monkeypatch, forward=(2.0, 2.5), backward=(3.0, 6.5), kernel=0.001, captured=(1.5, 2.0))
    found = own_time(rounds=1)
    first, again = clock.plain_operators, clock.replayed_operators
    forward = own_time_module._Blocks().forward_operators()
    assert 0 < again <= forward < first
    assert found.framework == pytest.approx((5.0 - 0.001 * first) / first)
    assert found.recording == pytest.approx(0.5 / forward)
    assert found.replaying == pytest.approx((3.5 - 0.001 * again) / again - found.framework)
    assert found.captured == pytest.approx((3.5 - 0.001 * first) / first)


def test_nothing_that_is_measured_is_below_zero(monkeypatch):
    """On a busy machine kernels alone may take longer than whole steps, and recomputed steps less than plain ones."""
    Clock(monkeypatch, forward=(2.0, 1.5), backward=(3.0, 2.5), kernel=10.0)
    assert astuple(own_time(rounds=1)) == (0.0, 0.0, 0.0, 0.0)


def test_measuring_leaves_the_random_generators_alone():
    torch.manual_seed(3)
    random.seed(3)
    before, before_python = torch.get_rng_state(), random.getstate()
    own_time(rounds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == before_python


def traced(model, executor):
    return trace_step(model, as_parts(split_batch(token_batch(2), 1), model_loss), model_loss, executor=executor)


def test_a_trace_charges_the_executor_for_what_it_notes_and_what_it_runs_again():
    model = decoder()
    cost = ExecutorCost(recorded=1.0, replayed=100.0)
    assert traced(model, cost).step_seconds == 0.0
    with recompute(model, "layers.*"):
        trace = traced(model, cost)
    again = sum(operator.phase is Phase.RECOMPUTE for operator in trace.operators)
    noted = sum(operator.phase is Phase.FORWARD and "layers." in operator.module for operator in trace.operators)
    assert again > 0
    assert trace.step_seconds == noted + 100.0 * again
