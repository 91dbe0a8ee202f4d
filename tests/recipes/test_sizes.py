"""Sizes read off a few dry runs: weights and gradients alone first, then a straight line of activations."""

import pytest

from tightfit import plan
from tightfit.devices.families import Family, family_of
from tightfit.errors import CannotFit
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.request import Request
from tightfit.planner.search.bisection import CORRECTIONS, Convex, Range
from tightfit.planner.search.search import Search
from tightfit.recipes.batches import Dimension
from tightfit.recipes.records import Recipe
from tightfit.recipes.search import RecipeSearch
from tightfit.recipes.sizes import largest_size, with_sizes
from tightfit.recipes.whole_step import PartTracer, frugal_levers, keeping_attention
from tightfit.step import TokenBatch


def convex(size):
    return max(1000, 10 * size)


def test_between_points_the_chord_is_never_too_much_and_beyond_them_the_last_slope_goes_on():
    points = Convex({n: convex(n) for n in (10, 20, 100, 200)})
    for limit in range(1000, 2001, 50):
        value = points.largest(limit, Range(0, 10**6))
        assert convex(value) <= limit
    assert points.largest(5000, Range(0, 10**6)) == 500
    assert points.largest(5000, Range(0, 300)) == 300
    assert points.largest(999, Range(0, 10**6)) == 10, "not even the smallest fits"


def test_a_flat_start_says_nothing_about_what_comes_after():
    points = Convex({n: convex(n) for n in (10, 20)})
    assert points.largest(1200, Range(0, 640)) == 640
    points[160] = convex(160)
    assert convex(points.largest(1200, Range(0, 640))) <= 1200
    points[points.largest(1200, Range(0, 640))] = convex(points.largest(1200, Range(0, 640)))
    assert points.largest(1200, Range(0, 640)) == pytest.approx(120, rel=0.25)


class Stepped:
    """`excess` says by how many bytes a whole step of a size exceeds the budget; tensors alone are a straight line.

    With attention kept, a step takes `saved` bytes less (None: it has none). Stands for what recipes share, and for the
    step of one of them.
    """

    def __init__(self, excess, saved=None):
        self.excess, self.ran, self.saved, self.recomputes = excess, [], saved, False
        self.points = {("length", 1024): Convex({1024: 1024, 2048: 2048})}
        self.levers = (), None if saved is None else ("attention kept",)

    def peak(self, shape, levers=()):
        return shape[1] - 40 - (self.saved if levers else 0)

    def peak_and_excess(self, shape, levers):
        size = shape[1]
        if not levers:
            self.ran.append(size)
        # What was run takes a little less than the line.
        return self.peak(shape, levers), self.excess(size) - (self.saved if levers else 0)

    def largest(self, limit):
        """The largest size where the sums of tensors would have this limit."""
        largest = largest_size(self, self, Dimension("length", 1024, 1, 32768, lambda n: (1, n)), limit)
        assert largest.confirmed
        assert len(self.ran) <= CORRECTIONS
        return largest.value


def test_between_a_size_that_fits_and_one_that_does_not_more_are_tried():
    """After a failure, what the line names lies far below what fits: the allocator cannot use one block."""
    sizes = Stepped(lambda size: size + (2000 if size > 8000 else 0) - 8500)
    assert 0.97 * 8000 <= sizes.largest(8500) <= 8000
    assert sizes.ran[1] < 0.9 * 8000  # what the line names after the failure


def test_where_a_size_that_fits_is_far_from_one_that_does_not_the_middle_is_tried_whatever_the_bytes_say():
    sizes = Stepped(lambda size: -10 if size <= 7000 else 5000)
    assert 0.9 * 7000 <= sizes.largest(9000) <= 7000


def test_a_size_with_more_room_than_the_sums_say_is_not_the_last():
    sizes = Stepped(lambda size: size - 8000)
    assert 0.98 * 8000 <= sizes.largest(5000) <= 8000


@pytest.mark.keeps("size-fit-confirms-looked")
def test_where_a_kept_attention_has_the_lower_peak_a_larger_size_fits_with_it():
    recomputed = Stepped(lambda size: size - 8000).largest(8000)
    sizes = Stepped(lambda size: size - 8000, saved=1000)
    assert 0.97 * 9000 <= sizes.largest(8000) <= 9000
    assert recomputed <= 8000
    worse = Stepped(lambda size: size - 8000, saved=-1000)
    assert worse.largest(8000) == recomputed
    assert worse.recomputes, "its other sizes are not tried with it"


@pytest.mark.keeps("size-fit-confirms-looked")
def test_attention_that_is_kept_runs_once_in_each_block_of_a_card():
    asked = Request.of(
        Decoder(DecoderConfig(hidden_size=64, num_layers=3, num_heads=2, vocab_size=64)).bfloat16(),
        TokenBatch(1, 128, 64),
        device="rtx4090",
        levers="rounding",
    )
    request = asked.checked()
    search = Search(request, "100%", tracer=PartTracer(request), limit_bytes=2**30)
    frugal = frugal_levers(search)
    keeping = keeping_attention(search, frugal)
    assert keeping is not None
    counts = [
        sum(family_of(each.name) is Family.ATTENTION for each in search.whole(*levers).operators)
        for levers in (frugal, keeping)
    ]
    assert counts == [6, 3]


@pytest.mark.keeps("size-fit-confirms-looked")
def test_sizes_with_states_on_the_host_do_not_depend_on_the_optimizers_tried_before():
    """A step that frees gradients at once shares no points with one that keeps them."""
    model = Decoder(DecoderConfig(hidden_size=256, num_layers=2, num_heads=2, vocab_size=128))
    asked = Request.of(model, TokenBatch(2, 32, 128), device="rtx4090", levers=())
    budget = "32MiB"
    offloaded, kept = Recipe(optimizer="offloaded_adamw"), Recipe(optimizer="sgd")

    def sizes(*recipes):
        """The longest sequence and the largest batch of each recipe, looked for in this order."""
        search = RecipeSearch(asked, budget)
        outcomes = [with_sizes(search, found, confirm=False).outcome for found in search.run(recipes)]
        return {each.recipe: (each.longest_sequence, each.largest_batch) for each in outcomes}

    def fits(batch):
        try:
            plan(model, batch, budget, device="rtx4090", optimizer=offloaded.optimizer, levers=())
        except CannotFit:
            return False
        return True

    among = sizes(kept, offloaded)
    assert among == sizes(offloaded) | sizes(kept)
    sequence, batch = (size.value for size in among[offloaded])
    assert fits(TokenBatch(batch, 32, 128))
    assert not fits(TokenBatch(batch + 1, 32, 128))
    assert fits(TokenBatch(2, sequence, 128))
    assert not fits(TokenBatch(2, int(1.1 * sequence), 128))
