"""Context parallel: ranks share each sequence, and FSDP2 shards the weights over the same ranks.

All ranks read the same batch. Embedding, head and loss read whole sequences, so that nobody's loss has to be changed.
The blocks between them read a part: attention gathers keys and values of all ranks (as the all-gather of Llama 3 does,
arXiv 2407.21783, section 3.3.2), and all else in a block treats each token by itself.

FSDP2 averages gradients over the ranks. Those of embedding and head are the same on each. Those of blocks are parts of
a sum, so what enters the blocks in backward is n times as large, and what leaves them is divided by n again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tightfit.errors import ModelError
from tightfit.levers.recompute.region import attributes_with_tensors, changed
from tightfit.ranks.sequence_parts import TOKENS, SequenceRanks, joined, split
from tightfit.ranks.shared_attention import SharedAttention, tables_of
from tightfit.ranks.shared_sequence import OR_FSDP2, SharedSequence
from tightfit.ranks.token_probe import tokens_meet
from tightfit.ranks.world import Sharding
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.runtime.module_paths import module_at
from tightfit.runtime.simulation import has_numbers
from tightfit.step import AUTOCAST_DTYPES, Precision


def in_context_parallel(
    model: nn.Module,
    blocks: Sequence[str],
    mesh: Any,
    sharding: Sharding | None = None,
    *,
    precision: Precision = "fp32",
) -> nn.Module:
    """The model itself, sharded in place by FSDP2, with blocks that share each sequence over a one-dimensional mesh.

    `blocks` are the paths of the repeated blocks, in the order in which they run. Each takes hidden states (B, T, D) as
    its first argument and returns them. All ranks must have the same weights and read the same batch, and T must be a
    multiple of twice their number. Dropout inside blocks draws other numbers than one process would.

    Raises `ModelError` for a model without repeated blocks, and for one that is divided already. In its first forward
    the model raises it for blocks in which tokens meet elsewhere than in fused attention: one block of each class is
    tried on real numbers (`token_probe`).
    """
    if not blocks:
        raise ModelError(f"{type(model).__name__} has no repeated blocks to share a sequence in: {OR_FSDP2}")
    modules = [module_at(model, path) for path in blocks]
    if any(isinstance(module, _SharesSequence) for module in modules):
        raise ModelError(f"{type(model).__name__} is divided over ranks already: divide a model once")
    ranks = SequenceRanks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    shared = SharedSequence(ranks, AUTOCAST_DTYPES.get(precision))
    classes: dict[type, type] = {}
    for place, (path, module) in enumerate(zip(blocks, modules, strict=True)):
        kind = type(module)
        # A class, as `fully_shard` gives one too. A lever's own forward stands on the instance, and runs this one.
        module.__class__ = classes.setdefault(kind, _sharing(kind))
        module.__dict__["_reading"] = reading = _Reading(shared, path, kind, is_first=place == 0)
        module.register_forward_pre_hook(reading.enter, with_kwargs=True)
        module.register_forward_hook(reading.leave_last if place == len(blocks) - 1 else reading.leave)
    return in_fsdp2(model, blocks, mesh, sharding, precision=precision)


class _Reading:
    """A block's hooks: what it reads is this rank's part, and what the last one returns is whole again."""

    def __init__(self, shared: SharedSequence, path: str, kind: type[nn.Module], *, is_first: bool):
        self.shared, self.path, self.kind, self.is_first = shared, path, kind, is_first
        self.is_known = False  # whether a forward of it has shown that tokens meet in attention only

    def enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook."""
        place = next((name for name, given in _named(args, kwargs) if _is_hidden(given)), None)
        if place is None:
            raise ModelError(f"{self.path} takes no hidden states (batch, tokens, width): {OR_FSDP2}")
        given = dict(_named(args, kwargs))
        hidden = given.pop(place)
        shared = self.shared
        if self.is_first:
            shared.begin(hidden, tree_leaves(given))
            hidden = split(hidden, shared.ranks)
        elif shared.length is None:
            raise ModelError(
                f"{self.path} runs alone, or a second time in backward, and ranks share sequences of a whole forward: "
                "recompute by a plan or `tightfit.recompute`"
            )
        if hidden.shape[TOKENS] != shared.part_length:
            raise ModelError(
                f"{self.path} takes {hidden.shape[TOKENS]} tokens, and a rank has {shared.part_length}: blocks that "
                f"do not read each other's hidden states cannot share a sequence: {OR_FSDP2}"
            )
        parts = {name: tree_map(lambda each: shared.part_of(each, self.path), each) for name, each in given.items()}
        parts[place] = hidden
        if has_numbers(hidden) and self.kind not in shared.tried:
            self._try(block, parts, place, len(args))
        return _arguments(parts, len(args))

    def _try(self, block: nn.Module, parts: Mapping[Any, Any], place: Any, count: int) -> None:
        """Raise `ModelError` for a block in which tokens meet elsewhere than in attention."""

        def forward(hidden: Tensor) -> Tensor:
            args, kwargs = _arguments({**parts, place: hidden}, count)
            return self._hidden_of(self.kind.forward(block, *args, **kwargs))

        if tokens_meet(block, forward, parts[place]):
            raise ModelError(
                f"{self.path}: a token changes what {self.kind.__name__} returns for another one beside attention, so "
                f"ranks cannot share its sequence: {OR_FSDP2}"
            )
        self.shared.tried.add(self.kind)

    def leave(self, block: nn.Module, args: tuple, out: Any) -> Any:
        """Forward hook."""
        self._hidden_of(out)
        return out

    def leave_last(self, block: nn.Module, args: tuple, out: Any) -> Any:
        """Forward hook."""
        part = self._hidden_of(out)
        whole = joined(part, self.shared.ranks)
        self.shared.end()
        return tree_map(lambda each: whole if each is part else each, out)

    def _hidden_of(self, out: Any) -> Tensor:
        found = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if len(found) != 1 or found[0].dim() != 3 or found[0].shape[TOKENS] != self.shared.part_length:
            raise ModelError(
                f"{self.path} returns {len(found)} tensors, and only hidden states can be joined again: {OR_FSDP2}"
            )
        return found[0]


def _named(args: tuple, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [*enumerate(args), *kwargs.items()]


def _arguments(named: Mapping[Any, Any], count: int) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call of which `count` have no name."""
    return tuple(named[place] for place in range(count)), {k: v for k, v in named.items() if isinstance(k, str)}


def _is_hidden(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3


class _SharesSequence:
    """Marks the classes of blocks that share a sequence."""


def _sharing(kind: type) -> type:
    """A block's class, in whose forward attention reads the keys and values of all ranks."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        reading: _Reading = self._reading
        before = None if reading.is_known else attributes_with_tensors(self)
        tables = frozenset() if reading.is_known else tables_of(self, reading.shared.part_length)
        with SharedAttention(reading.path, reading.shared, tables) as attention:
            out = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        attention.demand_calls()
        if before is not None:
            left = changed(before, attributes_with_tensors(self))
            if left:
                raise ModelError(f"{reading.path} leaves tensors of a part of the tokens on {left}: {OR_FSDP2}")
            reading.is_known = True
        return out

    return type(f"ContextParallel{kind.__name__}", (kind, _SharesSequence), {"forward": forward})
