"""`micro_batches="auto"`: the largest micro-batch that fits, the batch as it was."""

import pytest

from tightfit import plan, verify
from tightfit.errors import CannotFit
from tiny import allocator_peak, decoder, token_batch


@pytest.mark.slow  # a plan for each count
@pytest.mark.keeps("plan-uses-fewest-micro")
def test_the_micro_batches_are_the_fewest_that_have_a_plan():
    model, batch = decoder(), token_batch(8)
    found = plan(model, batch, "0.35x", micro_batches="auto")
    assert found.micro_batches in (2, 4)
    with pytest.raises(CannotFit):
        plan(model, batch, found.budget_bytes, micro_batches=found.micro_batches // 2)
    with found.apply(model):
        measured = allocator_peak(model, batch, micro_batches=found.micro_batches)
    assert measured <= found.budget_bytes
    assert measured == pytest.approx(found.peak_bytes, rel=0.001)


def test_what_fits_whole_is_not_split():
    model, batch = decoder(), token_batch(8)
    assert plan(model, batch, "2x", micro_batches="auto").micro_batches == 1
    assert plan(model, batch, "0.8x", micro_batches="auto").micro_batches == 1


@pytest.mark.keeps("plan-uses-fewest-micro")
@pytest.mark.slow  # a plan of micro-batches
def test_the_gradient_is_that_of_the_whole_batch():
    model, batch = decoder(), token_batch(8)
    batch["labels"][0, 10:] = -100
    report = verify(model, batch, plan(model, batch, "0.35x", micro_batches="auto"))
    assert report.ok, str(report)
