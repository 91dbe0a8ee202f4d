"""Compares the operators that a block runs with those that its plan was made from.

A policy names operators by what they are and by their number. If the real step runs other operators than the dry run
did, a name may mean another one, and a block keeps other bytes than the plan counted. So the first run of a planned
block is compared with the plan's, operator by operator.
"""

import warnings
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from tightfit.levers.recompute.policy import OperatorKey, Policy

_ALLOCATED = 512  # bytes: a card's allocator rounds to these, so that a plan for a card counts in them


class OtherOperators(UserWarning):
    """A planned block runs other operators than its plan was made from."""


class Ran(NamedTuple):
    """An operator that a block ran: its name, its operands (`operands_of`), and the bytes of its results."""

    name: str
    operands: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} of {self.operands} ({self.bytes:,} bytes)"


class Expected:
    """The operators of a kind of block, as planned. Mutable: whether a difference was reported."""

    def __init__(self, operators: Iterable[Ran]):
        self.operators = tuple(operators)
        self.is_reported = False

    def bind(self, policy: Policy, ran: Sequence[Ran], path: str) -> Policy:
        """The policy with each key bound to the operator that it means among those that ran.

        Warns once if that changes the policy.
        """
        planned, found = _alike(self.operators), _alike(ran)
        if sorted(planned) != sorted(found):  # another batch has other sizes: then only the names tell
            planned, found = ([each._replace(bytes=0) for each in run] for run in (planned, found))
        if planned == found:
            return policy
        places = dict(_matching(planned, found))
        before, after = keys_of(self.operators), keys_of(ran)
        now = {key: after[places[place]] for place, key in enumerate(before) if place in places}
        kept, offloaded = (
            frozenset(now[key] for key in keys if key in now) for keys in (policy.kept, policy.offloaded)
        )
        if (kept, offloaded) != (policy.kept, policy.offloaded):
            self._report(path, planned, ran, [k for k in (*policy.kept, *policy.offloaded) if k not in now])
        return Policy(kept, policy.default, offloaded, policy.offloads_inputs)

    def _report(self, path: str, planned: Sequence[Ran], ran: Sequence[Ran], missing: Sequence[OperatorKey]) -> None:
        if self.is_reported:
            return
        self.is_reported = True
        found = _alike(ran)
        place = next(
            (i for i, pair in enumerate(zip(planned, found, strict=False)) if pair[0][:2] != pair[1][:2]),
            min(len(planned), len(found)),
        )
        wanted = str(self.operators[place]) if place < len(self.operators) else "its end"
        instead = str(ran[place]) if place < len(ran) else "its end"
        lost = f" It has no {', '.join(map(str, sorted(missing)))}, which the plan keeps." if missing else ""
        warnings.warn(
            f"{path or 'the model'}: the block runs other operators than its plan was made from. Operator {place} is "
            f"{instead}, and was {wanted}.{lost} In this run it kept other results than the plan counted, so the peak "
            "of this step may be above the plan's; from its next run on it keeps the planned ones. Please report this",
            OtherOperators,
            stacklevel=2,
        )


def keys_of(operators: Iterable[Ran]) -> list[OperatorKey]:
    """The keys of operators in the order in which they run."""
    counts: dict[tuple[str, str], int] = {}
    keys = []
    for name, operands, _ in operators:
        occurrence = counts.get((name, operands), 0)
        counts[name, operands] = occurrence + 1
        keys.append(OperatorKey(name, occurrence, operands))
    return keys


def _alike(operators: Iterable[Ran]) -> list[Ran]:
    """The same with bytes in whole blocks of a card's allocator."""
    return [each._replace(bytes=-(-each.bytes // _ALLOCATED)) for each in operators]


def _matching(planned: Sequence[Ran], found: Sequence[Ran]) -> Iterable[tuple[int, int]]:
    """Pairs of places of the same operator: the longest runs in common, then the others in order."""
    blocks = SequenceMatcher(None, planned, found, autojunk=False).get_matching_blocks()
    pairs = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    yield from pairs
    taken, given = ({pair[side] for pair in pairs} for side in (0, 1))
    left: dict[Ran, list[int]] = {}
    for place, each in enumerate(found):
        if place not in given:
            left.setdefault(each, []).append(place)
    for place, each in enumerate(planned):
        if place not in taken and left.get(each):
            yield place, left[each].pop(0)
