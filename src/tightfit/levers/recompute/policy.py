"""The policy of a block: which operators' outputs it keeps, recomputes or offloads."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch


class Decision(enum.Enum):
    """The three states of a tensor between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class OperatorKey(NamedTuple):
    """An operator call inside a block: the third call of `aten.mm.default` with these operands has `occurrence` 2.

    `operands` are those of `operands_of`. Without them (keys written by hand, and in plans of earlier versions), calls
    with any operands count.
    """

    name: str
    occurrence: int
    operands: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.operands}" if self.operands else self.name


def operands_of(arguments: Iterable[Any]) -> str:
    """The operands of an operator: `float32[3], bfloat16[2]`, dtype and rank of each tensor, and any dtype asked for.

    This tells the calls of one operator apart where their numbers shift, because another run has a call more: a copy
    that only a card needs, a cast. Sizes are left out, since batches differ in them. So are tensors without a
    dimension, which are numbers.
    """
    found: list[Any] = []
    for item in arguments:
        if isinstance(item, torch.Tensor):
            found.append((item.dtype, item.dim()))
        elif type(item) is list or type(item) is tuple:
            found += [(part.dtype, part.dim()) for part in item if isinstance(part, torch.Tensor)]
        elif type(item) is torch.dtype:
            found.append(item)
    return _in_words(tuple(found))


@lru_cache(maxsize=4096)
def _in_words(found: tuple) -> str:
    words = [
        f"as {_short(item)}" if isinstance(item, torch.dtype) else f"{_short(item[0])}[{item[1]}]"
        for item in found
        if isinstance(item, torch.dtype) or item[1]
    ]
    return ", ".join(words) or "numbers"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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

    @property
    def counts_by_operands(self) -> bool:
        """True if its keys have operands, so that calls with other operands do not count."""
        return any(key.operands for key in (*self.kept, *self.offloaded))

    def decide(self, key: OperatorKey) -> Decision:
        if key in self.kept:
            return Decision.KEEP
        return Decision.OFFLOAD if key in self.offloaded else self.default

    @property
    def offloads_all(self) -> bool:
        """True if nothing is recomputed and nothing kept that could be offloaded."""
        return self.default is Decision.OFFLOAD and not (self.kept or self.offloaded)

    @property
    def offloads(self) -> bool:
        return self.offloads_inputs or bool(self.offloaded) or self.default is Decision.OFFLOAD


RECOMPUTE_ALL = Policy()
KEEP_ALL = Policy(default=Decision.KEEP)
OFFLOAD_ALL = Policy(default=Decision.OFFLOAD, offloads_inputs=True)
