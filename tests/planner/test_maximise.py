"""The largest value that has a plan: it fits when it really runs, and the next one has no plan."""

import pytest

from tightfit import TokenBatch, build_dry, maximise, plan
from tightfit.errors import BudgetError, CannotFit, InputError
from tiny import VOCABULARY, allocator_peak, decoder, token_batch

BUDGET = 5_000_000
MULTIPLE = 32


def longest(length):
    return build_dry(lambda: decoder(num_layers=2, max_position_embeddings=max(length, 512))), TokenBatch(
        2, length, VOCABULARY
    )


@pytest.fixture(scope="module")
def found():
    """The longest sequence."""
    return maximise(longest, BUDGET, what="sequence_length", multiple_of=MULTIPLE)


@pytest.mark.keeps("largest-sequence-batch-width")
def test_the_longest_sequence_fits_when_it_really_runs_and_a_longer_one_has_no_plan(found):
    model = decoder(num_layers=2, max_position_embeddings=max(found.value, 512))
    with found.plan.apply(model):
        measured = allocator_peak(model, token_batch(2, found.value))
    assert measured == pytest.approx(found.plan.peak_bytes, rel=0.001)
    assert measured <= BUDGET
    assert found.value % MULTIPLE == 0
    assert found.above is not None
    assert found.above.value == found.value + MULTIPLE
    with pytest.raises(CannotFit) as caught:
        plan(*longest(found.above.value), BUDGET)
    assert caught.value.least_bytes == found.above.least_bytes > BUDGET


@pytest.mark.slow  # three searches for the longest sequence
def test_more_levers_reach_further():
    values = [
        maximise(longest, BUDGET, what="sequence_length", multiple_of=8, levers=levers).value
        for levers in (("recompute",), ("recompute", "chunked_loss"))
    ]
    assert values[1] > values[0]


@pytest.mark.slow  # a search for the largest batch
def test_the_largest_batch_runs_in_the_micro_batches_that_were_given():
    model = decoder()
    found = maximise(
        lambda n: (model, TokenBatch(n, 48, VOCABULARY)), BUDGET, what="batch_size", multiple_of=2, micro_batches=2,
        levers="rounding",
    )  # fmt: skip
    assert found.plan.micro_batches == 2
    assert found.above is not None


def test_few_values_are_looked_at(found):
    assert len(found.tried) <= 12
    assert len(found.planned) <= 3
    assert set(found.planned) <= set(found.tried)


@pytest.mark.slow  # a plan for each value
def test_where_recomputing_all_is_not_the_least_the_value_is_planned_and_the_next_one_and_no_other():
    """A block's replay holds all of its feed-forward at once, so its least keeps something, as the prices say."""
    model = decoder(num_layers=2)
    how = {"what": "batch_size", "levers": "rounding"}
    found = maximise(lambda n: (model, TokenBatch(n, 8, VOCABULARY)), BUDGET, **how)
    assert found.above is not None
    assert found.planned == (found.value, found.above.value)
    assert found.plan.peak_bytes <= BUDGET < found.above.least_bytes
    assert "operators" in {choice.action for choice in found.plan.choices}


def test_a_bound_of_ones_own_is_kept_and_said():
    found = maximise(longest, BUDGET, what="sequence_length", multiple_of=8, at_most=70)
    assert (found.value, found.above) == (64, None)
    assert "no larger one was allowed" in str(found)


@pytest.mark.slow  # the least is searched
def test_where_not_even_the_smallest_fits_the_least_is_told():
    with pytest.raises(CannotFit, match=r"not even sequence_length 64 fits: .* the least is") as caught:
        maximise(longest, "1MB", what="sequence_length", multiple_of=64)
    assert caught.value.least_bytes > 1_000_000


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"budget": "0.5x"}, BudgetError, "rises with the batch_size: give bytes"),
        ({"micro_batches": "auto"}, InputError, "in enough micro-batches every batch fits"),
        ({"multiple_of": 0}, InputError, "multiple_of is 0"),
        ({"multiple_of": 8, "at_most": 7}, InputError, "at_most is 7, wanted at least one multiple of 8"),
    ],
)
def test_what_makes_no_sense_is_told(how, error, said):
    model = decoder()
    arguments = {"budget": BUDGET, "what": "batch_size", **how}
    with pytest.raises(error, match=said):
        maximise(lambda n: (model, TokenBatch(n, 16, VOCABULARY)), **arguments)


@pytest.mark.slow  # a search
def test_a_value_that_changes_nothing_is_found_out():
    model, batch = decoder(), token_batch(2, 16)
    with pytest.raises(InputError, match="any width fits: nothing grows with it"):
        maximise(lambda _: (model, batch), "1GB", what="width")
