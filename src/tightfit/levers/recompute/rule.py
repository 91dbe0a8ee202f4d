"""Recompute by a rule, where no plan decides: every block, every n-th block, or blocks joined to segments."""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.levers.recompute.policy import RECOMPUTE_ALL, Policy


@dataclass(frozen=True)
class Rule:
    """What each block does, by its path, and which blocks do not hold their output for the block that follows."""

    policies: dict[str, Policy]
    joined: tuple[str, ...] = ()


def every_block(paths: Sequence[str], *, segments: int | None = None) -> Rule:
    """Every block is recomputed. With `segments` the blocks are joined, in order, to so many runs whose lengths differ
    by at most one; only what enters a run is held.
    """
    count = len(paths)
    assert segments is None or 1 <= segments <= count, "whoever takes a number of segments from a user checks it"
    runs = count if segments is None else segments
    ends = {(run + 1) * count // runs - 1 for run in range(runs)}
    joined = tuple(path for place, path in enumerate(paths) if place not in ends)
    return Rule(dict.fromkeys(paths, RECOMPUTE_ALL), joined)


def every_second_block(paths: Sequence[str]) -> Rule:
    """The second block is recomputed, the fourth, and so on."""
    return Rule(dict.fromkeys(paths[1::2], RECOMPUTE_ALL))
