"""The policy of a block: which operators' outputs it keeps, recomputes or offloads."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Decision(enum.Enum):
    """The three states of a tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class OperatorKey(NamedTuple):
    """An operator call inside a block: `("aten.mm.default", 2)` is the third product of the block."""

    name: str
    occurrence: int


@dataclass(frozen=True)
class Policy:
    """Which operators' outputs a block keeps and which it offloads; the rest is recomputed in backward.

    `kept` and `offloaded` list operator calls. Calls that the planner did not see (in a block whose number of operators
    depends on the data) follow `default`. With `offloads_inputs` the block's inputs are offloaded too, unless others
    hold them anyway. Every policy is exact: it changes only bytes and seconds.
    """

    kept: frozenset[OperatorKey] = frozenset()
    default: Decision = Decision.RECOMPUTE
    offloaded: frozenset[OperatorKey] = frozenset()
    offloads_inputs: bool = False

    def decide(self, key: OperatorKey) -> Decision:
        if key in self.kept:
            return Decision.KEEP
        return Decision.OFFLOAD if key in self.offloaded else self.default

    @property
    def offloads(self) -> bool:
        return self.offloads_inputs or bool(self.offloaded) or self.default is Decision.OFFLOAD


RECOMPUTE_ALL = Policy()
KEEP_ALL = Policy(default=Decision.KEEP)
OFFLOAD_ALL = Policy(default=Decision.OFFLOAD, offloads_inputs=True)
