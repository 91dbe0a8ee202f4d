"""Chooses one option for each block, exactly: the least added seconds whose true peak is within the budget.

The choice is a 0/1 programme with one linear constraint for each point in time at which the peak could occur. A dynamic
programme solves it here instead of a MILP solver, because the chain's structure makes the exact method simpler and
faster. For the blocks before block i, the blocks after it matter only by one number: the highest point that they reach
above what the earlier blocks keep:

    height_n = middle_bytes
    height_i = max(own point of block i, kept_i + height_{i+1})        peak = max(fixed_bytes, height_0)

A suffix of the chain is therefore a label (height, seconds). A label that another one equals or beats in both can be
dropped, because maximum and sum are monotone (Nemhauser and Ullmann 1969, "Discrete dynamic programming and capital
allocation"). Identical blocks, whose permutations slow branch and bound down, merge into one label. A label is also
dropped if its seconds plus a lower bound for the blocks before it exceed a known solution. That bound is the linear
relaxation of those blocks under their prefix constraints: a sum of convex piecewise linear functions, each cut off
where its block's own point reaches the budget. Narrower sweeps, which keep only the most promising labels, give known
solutions. The sweep is widened until it drops no label for its width, so the last sweep is exact.

There is no tolerance: bytes are integers, and seconds are compared as whole nanoseconds. Choices that differ by less
tie, and the lower peak wins. Chains of transformers need tens to thousands of labels. A chain built to be hard (dozens
of blocks, seconds exactly proportional to bytes without a common unit: subset sum) can need millions. There the sweep
stops at `WIDEST`, and the solution says how far from the optimum it may be.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

NANOSECONDS = 1e9
FIRST_WIDTH, WIDENING, WIDEST = 128, 8, 8192  # labels a place
ROUNDING_SLACK = 0.5  # nanoseconds: above the rounding of the floating-point bound, below the unit of the labels


@dataclass(frozen=True)
class Option:
    """One way to run a block. Bytes are ints, relative to the level at the same point with nothing of this block kept.

    `kept_bytes` are held from the end of the block's forward to its backward. They are negative if the block holds less
    than in the case that the bases describe. `forward_bytes` is the highest point of its forward, relative to the level
    at its start. `backward_bytes` is the highest point of its backward, recompute included, relative to the level just
    after it. `seconds` is the time that it adds to a step.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float


@dataclass(frozen=True)
class Chain:
    """The blocks of a step in forward order, and the levels of memory around them, in bytes with no block keeping any.

    - `forward_base[i]`: the level at the start of block i's forward.
    - `backward_base[i]`: the level just after block i's backward, with the gradients so far.
    - `middle_bytes`: the highest point between the last forward and the first backward (the loss).
    - `fixed_bytes`: the highest point that no choice changes (the optimizer).
    """

    options: tuple[tuple[Option, ...], ...]
    forward_base: tuple[int, ...]
    backward_base: tuple[int, ...]
    middle_bytes: int
    fixed_bytes: int

    def __post_init__(self) -> None:
        blocks = len(self.options)
        assert len(self.forward_base) == len(self.backward_base) == blocks, "a chain has one pair of bases per block"
        assert all(self.options), "every block of a chain has at least one option"

    def lowered(self, nbytes: int) -> "Chain":
        """The chain with so many bytes fewer at every point, such as of weights that are elsewhere."""
        return replace(
            self,
            forward_base=tuple(level - nbytes for level in self.forward_base),
            backward_base=tuple(level - nbytes for level in self.backward_base),
            middle_bytes=self.middle_bytes - nbytes,
            fixed_bytes=self.fixed_bytes - nbytes,
        )


@dataclass(frozen=True)
class Solution:
    """A choice for the whole chain: `choice[i]` is the index of block i's option.

    `gap_seconds` is None if the choice is proved optimal. Otherwise no choice is faster by more than `gap_seconds`, and
    another choice with the same seconds may have a lower peak.
    """

    choice: tuple[int, ...]
    seconds: float
    peak_bytes: int
    gap_seconds: float | None = None


def peak(chain: Chain, choice: tuple[int, ...]) -> int:
    """The highest level of a step in bytes, over the fixed point, the loss, and every block's forward and backward."""
    kept, highest = 0, chain.fixed_bytes
    levels = zip(chain.options, choice, chain.forward_base, chain.backward_base, strict=True)
    for options, index, forward_base, backward_base in levels:
        option = options[index]
        own_point = max(forward_base + option.forward_bytes, backward_base + option.backward_bytes)
        highest = max(highest, kept + own_point)
        kept += option.kept_bytes
    return max(highest, kept + chain.middle_bytes)


def added_seconds(chain: Chain, choice: tuple[int, ...]) -> float:
    """Seconds that a choice adds to a step."""
    return math.fsum(options[index].seconds for options, index in zip(chain.options, choice, strict=True))


def solve(chain: Chain, budget: int) -> Solution | None:
    """The fastest choice whose peak is at most `budget` bytes, or None if nothing fits.

    Among the choices of least seconds (to the nanosecond) it has the least peak. Among these it has the lowest option
    indices, first block first. Both hold where `gap_seconds` is None. The peak therefore never rises when the budget
    falls: let p and p' be the peaks at the budgets b > b'. If p <= b', the choice of b is feasible at b', where it is
    still first in the same order among fewer choices, so p' = p. Otherwise p' <= b' < p.
    """
    if chain.fixed_bytes > budget:
        return None  # no option lowers the optimizer's peak
    blocks = _usable(_blocks(chain), budget)
    bounds = _prefix_bounds(blocks, budget) if blocks is not None else None
    if blocks is None or bounds is None:
        return None
    least_nanoseconds = float(bounds[-1](np.array(budget - chain.middle_bytes)))
    if least_nanoseconds == math.inf:
        return None  # even the least that all blocks can keep leaves no room for the loss
    fronts, proved = _fronts(blocks, bounds, chain.middle_bytes, budget)
    if not len(fronts[0].height):
        return None
    nanoseconds, highest = int(fronts[0].nanoseconds[-1]), max(chain.fixed_bytes, int(fronts[0].height[-1]))
    choice = _first_choice(blocks, fronts, nanoseconds, highest)
    assert peak(chain, choice) == highest <= budget, "the labels disagree with the peak of the choice they led to"
    # The relaxation of the whole chain bounds every choice, so it also bounds what an unfinished sweep may have missed.
    gap = None if proved else max(0, nanoseconds - math.ceil(least_nanoseconds - ROUNDING_SLACK)) / NANOSECONDS
    return Solution(choice, added_seconds(chain, choice), highest, gap)


def least_peak(chain: Chain) -> Solution:
    """The choice of least peak, in bytes, and among these of least seconds."""
    height = chain.middle_bytes
    # Heights alone need no labels: with seconds left out, one minimum for each block is exact.
    for block in reversed(_blocks(chain)):
        height = int(np.maximum(block.own_point, block.kept + height).min())
    solution = solve(chain, max(chain.fixed_bytes, height))
    assert solution is not None, "the least peak is the peak of a choice"
    return solution


@dataclass(frozen=True)
class _Block:
    """A block's options as int64 columns. `index` is each option's index in the chain."""

    index: np.ndarray
    kept: np.ndarray
    own_point: np.ndarray
    nanoseconds: np.ndarray

    def only(self, usable: np.ndarray) -> "_Block":
        return _Block(self.index[usable], self.kept[usable], self.own_point[usable], self.nanoseconds[usable])


@dataclass(frozen=True)
class _Front:
    """Labels of a suffix that no other one dominates. Heights rise and nanoseconds fall (int64)."""

    height: np.ndarray
    nanoseconds: np.ndarray


def _blocks(chain: Chain) -> list[_Block]:
    blocks = []
    for options, forward_base, backward_base in zip(
        chain.options, chain.forward_base, chain.backward_base, strict=True
    ):
        columns = np.array([(o.kept_bytes, o.forward_bytes, o.backward_bytes) for o in options], dtype=np.int64)
        own_point = np.maximum(forward_base + columns[:, 1], backward_base + columns[:, 2])
        nanoseconds = np.array([round(o.seconds * NANOSECONDS) for o in options], dtype=np.int64)
        blocks.append(_Block(np.arange(len(options)), columns[:, 0], own_point, nanoseconds))
    return blocks


def _usable(blocks: list[_Block], budget: int) -> list[_Block] | None:
    """The options that fit on top of the least bytes that the earlier blocks can keep; None if a block has none."""
    usable, least_kept = [], 0
    for block in blocks:
        block = block.only(block.own_point + least_kept <= budget)
        if not len(block.index):
            return None
        usable.append(block)
        least_kept += int(block.kept.min())
    return usable


@dataclass(frozen=True)
class _PrefixBound:
    """The fewest nanoseconds of the blocks before a place, by linear relaxation, as a function of the bytes they keep.

    The function is convex, falling and piecewise linear. Its corners are `kept` (bytes, rising) and `nanoseconds`,
    float64.
    """

    kept: np.ndarray
    nanoseconds: np.ndarray

    def __call__(self, room: np.ndarray) -> np.ndarray:
        """Lower bound in nanoseconds if the prefix may keep `room` bytes; infinite if it must keep more."""
        return np.interp(room, self.kept, self.nanoseconds, left=math.inf)

    def within(self, room: float) -> "_PrefixBound":
        """The same function with the kept bytes limited to `room`, which must be at least the first corner."""
        inside = self.kept <= room
        end = np.interp(room, self.kept, self.nanoseconds)
        return _PrefixBound(np.append(self.kept[inside], room), np.append(self.nanoseconds[inside], end))

    def plus(self, hull: "_PrefixBound") -> "_PrefixBound":
        """The bound of two independent parts together: infimal convolution, which merges the segments by slope."""
        kept = np.concatenate([np.diff(self.kept), np.diff(hull.kept)])
        nanoseconds = np.concatenate([np.diff(self.nanoseconds), np.diff(hull.nanoseconds)])
        kept, nanoseconds = kept[kept > 0], nanoseconds[kept > 0]
        order = np.argsort(nanoseconds / kept, kind="stable")
        return _PrefixBound(
            np.cumsum(np.concatenate([[self.kept[0] + hull.kept[0]], kept[order]])),
            np.cumsum(np.concatenate([[self.nanoseconds[0] + hull.nanoseconds[0]], nanoseconds[order]])),
        )


def _hull(block: _Block) -> _PrefixBound:
    """Lower convex hull of a block's (kept, nanoseconds), from its least kept bytes to its least nanoseconds."""
    corners: list[tuple[int, int]] = []
    for kept, nanoseconds in sorted(zip(block.kept.tolist(), block.nanoseconds.tolist(), strict=True)):
        if corners and nanoseconds >= corners[-1][1]:
            continue  # keeps more and is not faster
        while len(corners) > 1 and _above(corners[-2], corners[-1], (kept, nanoseconds)):
            corners.pop()
        corners.append((kept, nanoseconds))
    columns = np.array(corners, dtype=np.float64)
    return _PrefixBound(columns[:, 0], columns[:, 1])


def _above(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """True if `middle` is on or above the line from `left` to `right`."""
    return (middle[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (middle[0] - left[0])


def _prefix_bounds(blocks: list[_Block], budget: int) -> list[_PrefixBound] | None:
    """The bound before each block and after the last; None if the least kept bytes already exceed the budget."""
    bounds = [_PrefixBound(np.zeros(1), np.zeros(1))]
    for block in blocks:
        room = budget - int(block.own_point.min())
        if bounds[-1].kept[0] > room:
            return None
        bounds.append(bounds[-1].within(room).plus(_hull(block)))
    return bounds


def _fronts(
    blocks: list[_Block], bounds: list[_PrefixBound], middle_bytes: int, budget: int
) -> tuple[list[_Front], bool]:
    """For each place, the labels of the blocks after it that can be part of an optimal choice; whether all are there.

    Place 0 is the whole chain. Its labels are empty if nothing fits.
    """
    width, known = FIRST_WIDTH, math.inf
    # A narrow sweep is cheap and gives a solution. Its seconds prune most labels of the next, wider sweep.
    while True:
        fronts, complete = _sweep(blocks, bounds, middle_bytes, budget, known, width)
        if complete or width >= WIDEST or not len(fronts[0].height):
            return fronts, complete
        known, width = float(fronts[0].nanoseconds[-1]), width * WIDENING


def _sweep(
    blocks: list[_Block], bounds: list[_PrefixBound], middle_bytes: int, budget: int, known: float, width: int
) -> tuple[list[_Front], bool]:
    """Labels from the last block to the first, at most `width` for each place, and whether the width dropped none.

    The lowest label is always kept, so the choice of least peak is always found.
    """
    front, complete = _Front(np.array([middle_bytes], dtype=np.int64), np.zeros(1, dtype=np.int64)), True
    fronts = [front]
    for place in range(len(blocks) - 1, -1, -1):
        block = blocks[place]
        height = np.maximum(block.own_point[:, None], block.kept[:, None] + front.height).ravel()
        nanoseconds = (block.nanoseconds[:, None] + front.nanoseconds).ravel()
        bound = nanoseconds + bounds[place](budget - height)
        hopeful = np.flatnonzero((bound <= known + ROUNDING_SLACK) & (bound < math.inf))
        hopeful = hopeful[_undominated(height[hopeful], nanoseconds[hopeful])]
        if len(hopeful) > width:
            complete = False
            best = np.argpartition(bound[hopeful[1:]], width - 1)[: width - 1] + 1
            hopeful = hopeful[np.concatenate([[0], np.sort(best)])]
        front = _Front(height[hopeful], nanoseconds[hopeful])
        fronts.append(front)
    return fronts[::-1], complete


def _undominated(height: np.ndarray, nanoseconds: np.ndarray) -> np.ndarray:
    """Indices of the labels that no other one equals or beats in both, by rising height."""
    order = np.lexsort((nanoseconds, height))
    falling = nanoseconds[order]
    best_before = np.minimum.accumulate(falling)[:-1]
    return order[np.concatenate([np.ones(min(1, len(order)), dtype=bool), falling[1:] < best_before])]


def _first_choice(blocks: list[_Block], fronts: list[_Front], nanoseconds: int, highest: int) -> tuple[int, ...]:
    """The first choice by option indices, first block first, of at most these nanoseconds and this peak."""
    choice, room = [], highest
    for block, rest in zip(blocks, fronts[1:], strict=True):
        fitting = np.searchsorted(rest.height, room - block.kept, side="right") - 1
        left = nanoseconds - block.nanoseconds
        possible = (block.own_point <= room) & (fitting >= 0) & (rest.nanoseconds[fitting] <= left)
        option = int(np.flatnonzero(possible)[0])
        choice.append(int(block.index[option]))
        room, nanoseconds = room - int(block.kept[option]), int(left[option])
    return tuple(choice)
