"""Steps that update each weight within backward: estimated and planned as they run."""

from functools import partial

import pytest
import torch

from tightfit import estimate, plan
from tightfit.errors import InputError
from tightfit.levers.micro_batch import as_parts
from tightfit.optim import step_in_backward
from tightfit.planner.request import Request, Tracer
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tiny import allocator_peak, decoder, token_batch

BATCH = token_batch(1, 16)
model_of = partial(decoder, num_layers=3)
asked = partial(estimate, model_of(), BATCH)
TOLERANCE = 0.001


def train(model, optimizer):
    for _ in range(2):
        forward_backward(model, as_parts([BATCH], model_loss), model_loss)
        update(model, optimizer, StepSettings())


def in_backward(parameters):
    return step_in_backward(torch.optim.AdamW, list(parameters)).optimizer


@pytest.mark.keeps("estimate-plan-step-backward")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_estimate_is_the_allocators_peak(micro_batches):
    batch = token_batch(micro_batches, 16)
    found = estimate(model_of(), batch, step_in_backward=True, micro_batches=micro_batches)
    measured = allocator_peak(model_of(), batch, optimizer=in_backward, micro_batches=micro_batches)
    assert found.peak_bytes == pytest.approx(measured, rel=TOLERANCE)
    assert found.optimizer == "adamw, step in backward"


@pytest.mark.keeps("estimate-plan-step-backward")
def test_the_levels_that_price_blocks_are_those_of_the_whole_step():
    request = Request.of(model_of(), BATCH, optimizer="adamw", step_in_backward=True).checked()
    tracer = Tracer(request)
    whole = tracer.whole(request.plain, {})
    part = tracer.part(request.plain, {}, whole)
    assert part.levels == whole.levels[: len(part.levels)]
    assert part.by_category() == whole.by_category()


@pytest.mark.keeps("estimate-plan-step-backward")
def test_a_plan_takes_the_room_that_freed_gradients_leave_and_changes_no_bit():
    plain, planned = model_of(), model_of()
    # No plan fits such a budget if its prices count the gradients that are gone by then.
    found = plan(planned, BATCH, "0.985x", levers=["recompute"], step_in_backward=True)
    train(plain, torch.optim.AdamW(plain.parameters()))
    with found.apply(planned):
        train(planned, in_backward(planned.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))
        measured = allocator_peak(planned, BATCH, optimizer=in_backward)
    assert measured == pytest.approx(found.peak_bytes, rel=TOLERANCE)
    assert measured <= found.budget_bytes


def test_what_needs_all_gradients_at_once_is_refused():
    for settings, said in (({"grad_clip": 1.0}, "grad_clip 1"), ({"precision": "fp16"}, "precision fp16")):
        with pytest.raises(InputError, match=f"step_in_backward and {said} exclude each other"):
            asked(step_in_backward=True, **settings)
