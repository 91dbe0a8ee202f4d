"""What becomes of each operator's output inside a block: kept, recomputed, or (later) offloaded."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Decision(enum.Enum):
    """The three states of a tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"  # its place in the executor; the lever that moves the bytes is not built yet


class OperatorKey(NamedTuple):
    """An operator call inside a block: `("aten.mm.default", 2)` is the third product of the block."""

    name: str
    occurrence: int


@dataclass(frozen=True)
class Policy:
    """Which operators' outputs a block keeps; the rest is recomputed in backward.

    `kept` lists operator calls. A call beyond those the planner saw (a block whose number of operators depends on
    the data) follows `default`. Any policy is exact; it only moves bytes and seconds.
    """

    kept: frozenset[OperatorKey] = frozenset()
    default: Decision = Decision.RECOMPUTE

    def decide(self, key: OperatorKey) -> Decision:
        return Decision.KEEP if key in self.kept else self.default


RECOMPUTE_ALL = Policy()
KEEP_ALL = Policy(default=Decision.KEEP)
