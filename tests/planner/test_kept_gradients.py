"""Loops that set gradients to zero instead of None: each step begins with them."""

from functools import partial

import pytest
import torch

from tightfit import estimate, plan
from tightfit.memory.allocator import measured_peak
from tiny import decoder, token_batch

BATCH = token_batch(4, 48)
optimizer_of = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def measured(model):
    """The peak of the third step of a loop that keeps its gradients."""
    optimizer = optimizer_of(model.parameters())

    def step() -> None:
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    step()
    resident = [*BATCH.values(), *model.buffers()]
    for parameter in model.parameters():
        resident += [parameter, parameter.grad, optimizer.state[parameter]["momentum_buffer"]]
    return measured_peak(step, resident)


@pytest.mark.keeps("loops-set-gradients-zero")
def test_an_estimate_counts_the_gradients_that_stay():
    real = measured(decoder())
    foreseen = estimate(decoder(), BATCH, optimizer=optimizer_of, keep_gradients=True).peak_bytes
    assert foreseen == pytest.approx(real, rel=0.0005)
    assert estimate(decoder(), BATCH, optimizer=optimizer_of).peak_bytes < 0.99 * real


@pytest.mark.keeps("loops-set-gradients-zero")
def test_a_plan_counts_them_within_its_budget():
    model = decoder()
    planned = plan(model, BATCH, "0.8x", optimizer=optimizer_of, keep_gradients=True)
    with planned.apply(model):
        real = measured(model)
    assert real == pytest.approx(planned.peak_bytes, rel=0.001)
    assert real <= planned.budget_bytes


@pytest.mark.keeps("loops-set-gradients-zero")
def test_gradients_that_are_zero_say_that_they_stay():
    model = decoder()
    asked = partial(estimate, model, BATCH, optimizer=optimizer_of)
    without = asked().peak_bytes
    model(**BATCH).loss.backward()
    assert asked().peak_bytes == without  # a backward's own gradients are dropped before the next step
    model.zero_grad(set_to_none=False)
    assert asked().peak_bytes == asked(keep_gradients=True).peak_bytes > without
    assert asked(keep_gradients=False).peak_bytes == without
