"""Recompute by a rule, without a plan: every block, every second block, or blocks joined to segments."""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.levers.recompute.policy import RECOMPUTE_ALL, Policy


@dataclass(frozen=True)
class Rule:
    """The policy of each block, by path, and the `joined` blocks, which do not hold their output for the next one."""

    policies: dict[str, Policy]
    joined: tuple[str, ...] = ()


def every_block(paths: Sequence[str], *, segments: int | None = None) -> Rule:
    """Recompute every block.

    `segments` joins the blocks, in order, to that many runs, whose lengths differ by at most one. Only the inputs of
    each run are held.
    """
    count = len(paths)
    assert segments is None or 1 <= segments <= count, "callers check a user's number of segments"
    runs = count if segments is None else segments
    ends = {(run + 1) * count // runs - 1 for run in range(runs)}
    joined = tuple(path for place, path in enumerate(paths) if place not in ends)
    return Rule(dict.fromkeys(paths, RECOMPUTE_ALL), joined)


def every_second_block(paths: Sequence[str]) -> Rule:
    """Recompute the second block, the fourth, and so on."""
    return Rule(dict.fromkeys(paths[1::2], RECOMPUTE_ALL))
