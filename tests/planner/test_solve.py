"""The choice of one option per block, against enumeration and against its own promises."""

import itertools
import math
import random
import subprocess
import sys

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.planner.blocks.solve import Chain, Option, Solution, added_seconds, least_peak, peak, solve

MICROSECOND = 1e-6
PLAIN, RECOMPUTED = Option(40, 50, 20, 0.0), Option(10, 50, 60, 3.0)


def uniform_chain(blocks: int, options: tuple[Option, ...] = (PLAIN, RECOMPUTED), fixed_bytes: int = 0) -> Chain:
    return Chain((options,) * blocks, (100,) * blocks, (100,) * blocks, middle_bytes=110, fixed_bytes=fixed_bytes)


def random_chain(rng: random.Random, blocks: int, most_options: int, scale: int) -> Chain:
    """Blocks of a few kinds in mixed order, with ties in seconds and, at a small scale, in bytes too."""

    def option() -> Option:
        kept = rng.randint(-scale // 4, scale)
        seconds = rng.randint(0, 6) * MICROSECOND
        return Option(kept, rng.randint(0, 2 * scale), rng.randint(0, 2 * scale), seconds)

    kinds = [tuple(option() for _ in range(rng.randint(1, most_options))) for _ in range(rng.randint(1, 3))]
    gradient = rng.randint(0, scale // 2)
    return Chain(
        options=tuple(rng.choice(kinds) for _ in range(blocks)),
        forward_base=tuple(10 * scale + rng.randint(0, scale // 8) for _ in range(blocks)),
        backward_base=tuple(10 * scale + gradient * (blocks - place) for place in range(blocks)),
        middle_bytes=10 * scale + rng.randint(0, 3 * scale),
        fixed_bytes=rng.choice([0, 12 * scale]),
    )


def every_choice(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """(nanoseconds, peak bytes) of every choice, by running forward along the chain."""
    nanoseconds = kept = np.zeros(1, dtype=np.int64)
    highest = np.full(1, chain.fixed_bytes, dtype=np.int64)
    for options, forward_base, backward_base in zip(
        chain.options, chain.forward_base, chain.backward_base, strict=True
    ):
        keeps = np.array([o.kept_bytes for o in options])
        forward = np.array([forward_base + o.forward_bytes for o in options])
        backward = np.array([backward_base + o.backward_bytes for o in options])
        adds = np.array([round(o.seconds * 1e9) for o in options])
        here = np.maximum(kept[:, None] + forward, kept[:, None] + backward)
        highest = np.maximum(highest[:, None], here).ravel()
        nanoseconds = (nanoseconds[:, None] + adds).ravel()
        kept = (kept[:, None] + keeps).ravel()
    return nanoseconds, np.maximum(highest, kept + chain.middle_bytes)


def nanoseconds_and_peak(solution: Solution) -> tuple[int, int]:
    return round(solution.seconds * 1e9), solution.peak_bytes


def assert_agrees_with_enumeration(chain: Chain, budgets: list[int]) -> None:
    nanoseconds, peaks = every_choice(chain)
    for budget in budgets:
        fits = peaks <= budget
        solution = solve(chain, budget)
        if not fits.any():
            assert solution is None
            continue
        assert solution is not None
        assert solution.gap_seconds is None
        least = nanoseconds[fits].min()
        assert nanoseconds_and_peak(solution) == (least, peaks[fits & (nanoseconds == least)].min())
        assert peak(chain, solution.choice) == solution.peak_bytes
        assert added_seconds(chain, solution.choice) == solution.seconds
    lowest = peaks.min()
    assert nanoseconds_and_peak(least_peak(chain)) == (nanoseconds[peaks == lowest].min(), lowest)


@pytest.mark.keeps("choice-inside-blocks-optimal")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_solution_is_that_of_enumeration_on_fifty_random_chains(seed):
    rng = random.Random(seed)
    for _ in range(50):
        blocks = rng.randint(1, 10)
        chain = random_chain(rng, blocks, most_options=3 if blocks > 6 else 5, scale=rng.choice([8, 100, 10**12]))
        peaks = every_choice(chain)[1]
        low, high = int(peaks.min()), int(peaks.max())
        assert_agrees_with_enumeration(chain, [low - 1, low, rng.randint(low, high), (low + high) // 2, high])


@pytest.mark.parametrize("seed", range(4))
def test_solution_is_that_of_enumeration_where_sweeps_start_too_narrow(seed, monkeypatch):
    monkeypatch.setattr("tightfit.planner.blocks.solve.FIRST_WIDTH", 2)
    monkeypatch.setattr("tightfit.planner.blocks.solve.WIDENING", 2)
    rng = random.Random(100 + seed)
    for _ in range(20):
        chain = random_chain(rng, 8, most_options=4, scale=rng.choice([100, 10**12]))
        peaks = every_choice(chain)[1]
        low, high = int(peaks.min()), int(peaks.max())
        assert_agrees_with_enumeration(chain, [low, rng.randint(low, high), (low + high) // 2])


def test_peak_is_the_highest_of_all_points_in_time():
    chain = Chain(
        options=((Option(5, 20, 0, 0.0),), (Option(7, 0, 30, 0.0),)),
        forward_base=(100, 100),
        backward_base=(104, 102),
        middle_bytes=90,
        fixed_bytes=0,
    )
    assert peak(chain, (0, 0)) == 5 + 102 + 30
    assert peak(Chain(chain.options, (140, 100), (104, 102), 90, 0), (0, 0)) == 140 + 20
    assert peak(Chain(chain.options, (100, 100), (104, 102), 130, 0), (0, 0)) == 130 + 12
    assert peak(Chain(chain.options, (100, 100), (104, 102), 90, 500), (0, 0)) == 500


def test_plain_blocks_are_chosen_where_everything_fits():
    chain = uniform_chain(4)
    solution = solve(chain, 10**6)
    assert solution == Solution((0, 0, 0, 0), 0.0, peak(chain, (0, 0, 0, 0)))


def test_a_byte_less_than_the_peak_costs_a_recompute():
    chain = uniform_chain(4)
    plain_peak = peak(chain, (0, 0, 0, 0))
    solution = solve(chain, plain_peak - 1)
    assert solution is not None
    assert solution.seconds == 3.0
    assert solution.peak_bytes < plain_peak


def test_nothing_fits_below_the_least_peak():
    chain = uniform_chain(4)
    assert solve(chain, least_peak(chain).peak_bytes - 1) is None


def test_nothing_fits_where_the_optimizer_alone_is_above_the_budget():
    assert solve(uniform_chain(2, fixed_bytes=1000), 999) is None


def test_no_recompute_is_bought_below_a_point_that_no_choice_moves():
    assert least_peak(uniform_chain(2, fixed_bytes=1000)) == Solution((0, 0), 0.0, 1000)


def test_a_chain_without_blocks_has_the_peak_of_the_rest():
    chain = Chain((), (), (), middle_bytes=30, fixed_bytes=20)
    assert solve(chain, 30) == least_peak(chain) == Solution((), 0.0, 30)
    assert solve(chain, 29) is None


def test_options_that_keep_less_than_nothing_make_room():
    saver, spender = Option(-50, 0, 0, 1.0), Option(60, 0, 0, 0.0)
    chain = Chain(((saver, Option(0, 0, 0, 0.0)), (spender,)), (0, 0), (0, 0), middle_bytes=0, fixed_bytes=0)
    assert solve(chain, 59) == Solution((0, 0), 1.0, 10)


def test_choices_equal_in_seconds_and_peak_resolve_to_the_lowest_indices():
    twin = Option(10, 10, 10, 1.0)
    assert least_peak(uniform_chain(5, (twin, twin, twin))).choice == (0,) * 5


@pytest.mark.keeps("smaller-budget-never-larger")
@pytest.mark.slow  # many budgets
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 20))
def test_peak_never_rises_and_seconds_never_fall_as_the_budget_falls(seed, blocks):
    rng = random.Random(seed)
    chain = random_chain(rng, blocks, most_options=6, scale=1000)
    low = least_peak(chain).peak_bytes
    budgets = sorted((rng.randint(low, low + 3000 * blocks) for _ in range(12)), reverse=True)
    solutions = [solve(chain, budget) for budget in budgets]
    assert all(s is not None and s.peak_bytes <= budget for s, budget in zip(solutions, budgets, strict=True))
    for looser, tighter in itertools.pairwise(s for s in solutions if s is not None):
        assert tighter.peak_bytes <= looser.peak_bytes
        assert tighter.seconds >= looser.seconds


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_choice_does_not_depend_on_budget_that_it_leaves_unused(seed):
    rng = random.Random(seed)
    chain = random_chain(rng, 12, most_options=5, scale=1000)
    loose = solve(chain, least_peak(chain).peak_bytes + rng.randint(0, 20000))
    assert loose is not None
    assert solve(chain, loose.peak_bytes) == loose


def seconds_by_milp(chain: Chain, budget: int) -> float:
    """Least seconds by a MILP solver, in units (GB, milliseconds) that suit its tolerances."""
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("mip_rel_gap", 0.0)
    kept: dict[int, float] = {}

    def at_most(limit: float, row: dict[int, float]) -> None:
        model.addRow(-math.inf, limit, len(row), np.array(list(row), dtype=np.int32), np.array(list(row.values())))

    for place, options in enumerate(chain.options):
        columns = range(model.getNumCol(), model.getNumCol() + len(options))
        for column, option in zip(columns, options, strict=True):
            model.addVar(0.0, 1.0)
            model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
            model.changeColCost(column, option.seconds * 1e3)
        model.addRow(1.0, 1.0, len(options), np.array(columns, dtype=np.int32), np.ones(len(options)))
        forward, backward = chain.forward_base[place], chain.backward_base[place]
        own = [max(forward + o.forward_bytes, backward + o.backward_bytes) / 1e9 for o in options]
        at_most(budget / 1e9, kept | dict(zip(columns, own, strict=True)))
        kept |= {column: o.kept_bytes / 1e9 for column, o in zip(columns, options, strict=True)}
    at_most((budget - chain.middle_bytes) / 1e9, kept)
    model.run()
    return model.getObjectiveValue() / 1e3


@pytest.mark.keeps("choice-inside-blocks-optimal")
def test_a_chain_too_long_to_enumerate_agrees_with_a_milp_solver():
    rng = random.Random(4)
    kinds = [
        tuple(
            Option(rng.randint(0, 10**9), rng.randint(0, 10**9), rng.randint(0, 2 * 10**9), rng.uniform(0, 0.01))
            for _ in range(6)
        )
        for _ in range(3)
    ]
    options = tuple(rng.choice(kinds) for _ in range(16))
    backward_base = tuple(10**10 + 10**8 * (16 - place) for place in range(16))
    chain = Chain(options, (10**10,) * 16, backward_base, middle_bytes=10**10, fixed_bytes=0)
    low, high = least_peak(chain), solve(chain, 10**12)
    assert high is not None
    for share in (0.2, 0.5, 0.8):
        budget = int(low.peak_bytes + share * (high.peak_bytes - low.peak_bytes))
        solution = solve(chain, budget)
        assert solution is not None
        assert solution.seconds == pytest.approx(seconds_by_milp(chain, budget), abs=1e-6)


def test_seconds_proportional_to_bytes_without_a_common_unit_are_answered_within_the_stated_gap():
    rng = random.Random(0)
    steps = list(itertools.accumulate(rng.randint(10**6, 10**9) for _ in range(11)))
    options = tuple(Option(steps[-1] - b, steps[-1], steps[-1], b * 3e-12) for b in (0, *steps))
    chain = Chain((options,) * 24, (0,) * 24, (0,) * 24, middle_bytes=0, fixed_bytes=0)
    budget = 13 * steps[-1]
    solution = solve(chain, budget)
    assert solution is not None
    assert solution.peak_bytes <= budget
    fewest_seconds = (24 * steps[-1] - budget) * 3e-12
    assert solution.gap_seconds is not None
    assert solution.gap_seconds < 1e-5
    assert fewest_seconds <= solution.seconds <= fewest_seconds + solution.gap_seconds + 1e-7


def test_the_solver_does_not_import_torch():
    program = (
        "import sys, tightfit.planner.blocks.solve, tightfit.planner.blocks.frontier; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
