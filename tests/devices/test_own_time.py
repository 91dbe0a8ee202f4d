"""What PyTorch and the executor take of a CPU for an operator, beside its kernel."""

import random
from dataclasses import astuple

import torch

from tightfit.devices.own_time import own_time
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.recompute import recompute
from tightfit.step import model_loss
from tightfit.trace.record import Phase
from tightfit.trace.recording import ExecutorCost
from tightfit.trace.step import trace_step
from tiny import decoder, token_batch


def test_nothing_that_is_measured_is_below_zero():
    assert min(astuple(own_time(rounds=5))) >= 0  # on a busy machine, kernels alone may take longer than whole steps


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
