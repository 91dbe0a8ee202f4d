"""Sizes read off a few dry runs: weights and gradients alone first, then a straight line of activations."""

from types import SimpleNamespace

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
from tightfit.recipes.sizes import largest_size, lines_by_size, with_sizes
from tightfit.recipes.whole_step import PartTracer, frugal_levers, keeping_attention
from tightfit.step import TokenBatch
from tightfit.tracing.record import Category


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


class Part:
    """A trace of one operator whose activations are as many bytes as a size has tokens; `saved` bytes are less."""

    def __init__(self, size, saved):
        self.peak_bytes, self.size = size - 40 - saved, size
        self.levels = [self.peak_bytes]

    def timeline(self):
        return {each: [0] for each in Category} | {Category.ACTIVATION: [self.size]}


class Stepped:
    """`excess` says by how many bytes a whole step of a size exceeds the budget; tensors alone are a straight line.

    With attention kept, a step takes `saved` bytes less (None: it has none). Stands for what recipes share, and for the
    step of one of them.
    """

    def __init__(self, excess, saved=None):
        self.excess, self.ran, self.saved, self.recomputes = excess, [], saved, False
        self.points = {("length", 1024): Convex({1024: 1024, 2048: 2048})}
        self.refused = {}
        self.levers = (), None if saved is None else ("attention kept",)

    def part(self, shape):
        return Part(shape[1], 0)

    def part_and_excess(self, shape, levers):
        size, saved = shape[1], self.saved if levers else 0
        if not levers:
            self.ran.append(size)
        # What was run takes a little less than the line.
        return Part(size, saved), self.excess(size) - saved

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


def test_what_the_allocator_has_no_room_for_in_a_sequence_is_not_tried_in_a_batch():
    """From 9,500 tokens on something beside the bytes is full, which only a run shows: not once for each size."""
    sizes = Stepped(lambda size: 5000 if size > 9500 else size - 20_000)
    sizes.points.clear()
    found = sizes.largest(20_000)
    refused = [size for size in sizes.ran if size > 9500]
    sizes.ran.clear()
    batch = largest_size(sizes, sizes, Dimension("size", 1, 1, 32, lambda n: (1, 1024 * n)), 20_000)
    assert sizes.ran
    assert batch.value == found // 1024 >= 8
    assert max(sizes.ran) < min(refused)


def test_one_dry_run_says_how_a_step_grows_and_what_stays():
    """A step that holds 1,000 bytes of weights and 3 a token at its end, and 500 and 10 a token before it."""
    part = SimpleNamespace(
        levels=[500 + 10 * 40, 1000 + 3 * 40],
        timeline=lambda: {each: [0, 0] for each in Category} | {Category.ACTIVATION: [10 * 40, 3 * 40]},
    )
    lines = lines_by_size(part, 40)
    for size in (1, 40, 71, 72, 1000):
        most = max(500 + 10 * size, 1000 + 3 * size)
        assert lines.largest(most) == pytest.approx(size)
    assert Convex({40: 1120}, {40: lines}).largest(2500, Range(1, 10**6)) == 200


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


@pytest.mark.slow  # two searches
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
