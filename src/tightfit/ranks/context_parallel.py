"""Context parallel: ranks share each sequence, and FSDP2 shards the weights over the same ranks.

All ranks read the same batch. Embedding, head and loss read whole sequences, so that nobody's loss has to be changed.
The blocks between them read a part: attention gathers keys and values of all ranks (as the all-gather of Llama 3 does,
arXiv 2407.21783, section 3.3.2), and all else in a block treats each token by itself. Of 2n pieces rank r of n has
those numbered r and 2n - 1 - r, so that causal attention is equal work for all.

FSDP2 averages gradients over the ranks. Those of embedding and head are the same on each. Those of blocks are parts of
a sum, so what enters the blocks in backward is n times as large, and what leaves them is divided by n again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tightfit.errors import ModelError
from tightfit.levers.recompute.region import attributes_with_tensors, changed
from tightfit.ranks.sharing import add_up_parts, gather_parts
from tightfit.ranks.token_probe import tokens_meet
from tightfit.ranks.world import Sharding
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.runtime.activity import now
from tightfit.runtime.module_paths import module_at
from tightfit.step import AUTOCAST_DTYPES, Precision

_OR_FSDP2 = "take parallel='fsdp2'"
_TOKENS = 1  # the dimension of hidden states (B, T, D) along which they are divided


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
        raise ModelError(f"{type(model).__name__} has no repeated blocks to share a sequence in: {_OR_FSDP2}")
    modules = [module_at(model, path) for path in blocks]
    if any(isinstance(module, _SharesSequence) for module in modules):
        raise ModelError(f"{type(model).__name__} is divided over ranks already: divide a model once")
    ranks = _Ranks(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())
    shared = _Shared(ranks, AUTOCAST_DTYPES.get(precision))
    classes: dict[type, type] = {}
    for place, (path, module) in enumerate(zip(blocks, modules, strict=True)):
        kind = type(module)
        # A class, as `fully_shard` gives one too. A lever's own forward stands on the instance, and runs this one.
        module.__class__ = classes.setdefault(kind, _sharing(kind))
        module.__dict__["_reading"] = reading = _Reading(shared, path, kind, is_first=place == 0)
        module.register_forward_pre_hook(reading.enter, with_kwargs=True)
        module.register_forward_hook(reading.leave_last if place == len(blocks) - 1 else reading.leave)
    return in_fsdp2(model, blocks, mesh, sharding, precision=precision)


class _Ranks(NamedTuple):
    """The ranks that share a sequence, and this one's number. `group` is the name of their process group."""

    group: str
    number: int
    size: int

    def own_pieces(self, whole: Tensor, side: int) -> list[Tensor]:
        """Views of this rank's two pieces of a tensor along a dimension."""
        length = whole.shape[side] // (2 * self.size)
        return [whole.narrow(side, piece * length, length) for piece in self.pieces(self.number)]

    def pieces(self, number: int) -> tuple[int, int]:
        """The numbers of a rank's pieces."""
        return number, 2 * self.size - 1 - number

    def part(self, whole: Tensor, side: int) -> Tensor:
        """This rank's part of a tensor, with memory of its own."""
        return torch.cat(self.own_pieces(whole, side), side)

    def whole(self, part: Tensor, side: int) -> Tensor:
        """All parts along a dimension, counted from the front, in the order of the tokens."""
        parts = gather_parts(part.contiguous(), self.size, self.group)
        length = part.shape[side] // 2
        first = [parts[number].narrow(side, 0, length) for number in range(self.size)]
        second = [parts[number].narrow(side, length, length) for number in reversed(range(self.size))]
        return torch.cat([*first, *second], side)

    def sum(self, whole: Tensor, side: int) -> Tensor:
        """This rank's part of the sum of what each rank has for the whole."""
        length = whole.shape[side] // (2 * self.size)
        shape = list(whole.shape)
        shape[side] = 2 * length
        parts = whole.new_empty((self.size, *shape))
        for number in range(self.size):
            for place, piece in enumerate(self.pieces(number)):
                parts[number].narrow(side, place * length, length).copy_(whole.narrow(side, piece * length, length))
        return add_up_parts(parts, self.size, self.group)


class _Split(torch.autograd.Function):
    """Each rank takes its part of what all have. The gradient of the whole is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.part(whole, _TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.whole(gradients[0], _TOKENS).div_(ctx.ranks.size), None


class _Joined(torch.autograd.Function):
    """The parts become the whole on all ranks. Each takes its part of the gradient, n times as large."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.whole(part, _TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.part(gradients[0], _TOKENS).mul_(ctx.ranks.size), None


class _Gathered(torch.autograd.Function):
    """Keys or values (..., T / n, D) of all ranks, (..., T, D). Each rank's queries give them a gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: _Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.whole(part, part.dim() - 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.sum(gradients[0], gradients[0].dim() - 2), None


class _Shared:
    """Mutable: the sequence that the ranks share in the forward that runs."""

    def __init__(self, ranks: _Ranks, dtype: torch.dtype | None):
        self.ranks = ranks
        self.dtype = dtype  # in which blocks compute; None: that of hidden states
        self.length: int | None = None  # of the whole sequence; None between two forwards
        self.mask: Tensor | None = None
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, beside the whole: no other gets it meanwhile
        self.tried: set[type] = set()  # classes of blocks in which tokens meet in attention only, by real numbers

    @property
    def part_length(self) -> int:
        assert self.length is not None, "a forward runs"
        return self.length // self.ranks.size

    def begin(self, hidden: Tensor, others: Any) -> None:
        """A forward begins. Raises `ModelError` for a length that the ranks cannot share evenly."""
        self.end()
        length, share = hidden.shape[_TOKENS], 2 * self.ranks.size
        if length % share:
            raise ModelError(
                f"sequences have {length} tokens, and {self.ranks.size} ranks share a multiple of {share} evenly: "
                "pad the batch, or take another length"
            )
        self.length = length
        masked = any(isinstance(t, Tensor) and t.dim() > 2 and t.shape[-2:] == (length, length) for t in others)
        if not (masked or _on_card(hidden)):
            self.mask = self._causal_mask(hidden, length)

    def end(self) -> None:
        self.length = self.mask = None
        self._parts.clear()

    def part_of(self, given: Any, path: str) -> Any:
        """This rank's part of an argument of a block, if it is a tensor with an entry for each token."""
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        known = self._parts.get(id(given))
        if known is None:
            side = _side_of_tokens(given)
            if given.shape[side] == 1:
                return given
            if given.shape[side] != self.length:
                raise ModelError(
                    f"{path} reads a tensor of shape {tuple(given.shape)} beside hidden states of {self.length} "
                    f"tokens, and which part of it belongs to a rank is not known: {_OR_FSDP2}"
                )
            # Made once for all blocks, as the whole is. Its gradient on each rank is n times that of the rank's tokens,
            # and zero for the others, so what FSDP2 averages in the end is the sum.
            known = self._parts[id(given)] = given, self.ranks.part(given, side)
        return known[1]

    def _causal_mask(self, hidden: Tensor, length: int) -> Tensor:
        """(T / n, T), 0 where a query of this rank sees the key, and -inf elsewhere."""
        positions = torch.arange(length, device=hidden.device)
        hides = self.ranks.part(positions, 0)[:, None] < positions
        mask = torch.zeros(hides.shape, dtype=self.dtype or hidden.dtype, device=hidden.device)
        return mask.masked_fill_(hides, -torch.inf)


def _side_of_tokens(given: Tensor) -> int:
    """The dimension that counts tokens: ids (B, T), rotations (T, D), (B, T, D) or (B, 1, T, D), masks (B, 1, T, T)."""
    if given.dim() == 2:
        return 0 if given.is_floating_point() else 1
    return {1: 0, 3: 1}.get(given.dim(), given.dim() - 2)


def _on_card(tensor: Tensor) -> bool:
    return tensor.is_cuda or now.playing_cuda


class _Reading:
    """A block's hooks: what it reads is this rank's part, and what the last one returns is whole again."""

    def __init__(self, shared: _Shared, path: str, kind: type[nn.Module], *, is_first: bool):
        self.shared, self.path, self.kind, self.is_first = shared, path, kind, is_first
        self.is_known = False  # whether a forward of it has shown that tokens meet in attention only

    def enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook."""
        place = next((name for name, given in _named(args, kwargs) if _is_hidden(given)), None)
        if place is None:
            raise ModelError(f"{self.path} takes no hidden states (batch, tokens, width): {_OR_FSDP2}")
        given = dict(_named(args, kwargs))
        hidden = given.pop(place)
        shared = self.shared
        if self.is_first:
            shared.begin(hidden, tree_leaves(given))
            hidden = _Split.apply(hidden, shared.ranks)
        elif shared.length is None:
            raise ModelError(
                f"{self.path} runs alone, or a second time in backward, and ranks share sequences of a whole forward: "
                "recompute by a plan or `tightfit.recompute`"
            )
        if hidden.shape[_TOKENS] != shared.part_length:
            raise ModelError(
                f"{self.path} takes {hidden.shape[_TOKENS]} tokens, and a rank has {shared.part_length}: blocks that "
                f"do not read each other's hidden states cannot share a sequence: {_OR_FSDP2}"
            )
        parts = {name: tree_map(lambda each: shared.part_of(each, self.path), each) for name, each in given.items()}
        parts[place] = hidden
        if not now.dry and self.kind not in shared.tried:
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
                f"ranks cannot share its sequence: {_OR_FSDP2}"
            )
        self.shared.tried.add(self.kind)

    def leave(self, block: nn.Module, args: tuple, out: Any) -> Any:
        """Forward hook."""
        self._hidden_of(out)
        return out

    def leave_last(self, block: nn.Module, args: tuple, out: Any) -> Any:
        """Forward hook."""
        part = self._hidden_of(out)
        whole = _Joined.apply(part, self.shared.ranks)
        self.shared.end()
        return tree_map(lambda each: whole if each is part else each, out)

    def _hidden_of(self, out: Any) -> Tensor:
        found = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        if len(found) != 1 or found[0].dim() != 3 or found[0].shape[_TOKENS] != self.shared.part_length:
            raise ModelError(
                f"{self.path} returns {len(found)} tensors, and only hidden states can be joined again: {_OR_FSDP2}"
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
        with _Attention(self, reading) as attention:
            out = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        attention.demand_calls()
        if before is not None:
            left = changed(before, attributes_with_tensors(self))
            if left:
                raise ModelError(f"{reading.path} leaves tensors of a part of the tokens on {left}: {_OR_FSDP2}")
            reading.is_known = True
        return out

    return type(f"ContextParallel{kind.__name__}", (kind, _SharesSequence), {"forward": forward})


# Tokens meet in these.
_MIXING: frozenset[Any] = frozenset(
    {F.multi_head_attention_forward, torch.cumsum, Tensor.cumsum, torch.roll, Tensor.roll, torch.flip, Tensor.flip}
    | {getattr(module, name) for name in ("conv1d", "conv2d", "conv3d") for module in (torch, F)}
)


class _Attention(TorchFunctionMode):
    """A context in which fused attention reads the keys and values of all ranks.

    Raises `ModelError` for functions in which tokens meet otherwise, and for positions that are counted anew.
    """

    def __init__(self, block: nn.Module, reading: _Reading):
        super().__init__()
        self._path, self._shared = reading.path, reading.shared
        self._calls = 0
        length = self._shared.part_length
        self._tables = (
            set()
            if reading.is_known
            else {id(buffer) for buffer in block.buffers() if buffer.dim() and max(buffer.shape) >= length}
        )

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._calls += 1
            return self._attend(*args, **kwargs)
        if func in _MIXING:
            raise self._refusal(f"calls {func.__name__}, in which tokens may meet")
        if self._tables and any(id(each) in self._tables for each in args):
            raise self._refusal("reads a table of positions of its own")
        out = func(*args, **kwargs)
        if func is torch.arange and out.numel() == self._shared.part_length:
            raise self._refusal("counts positions itself")
        return out

    def demand_calls(self) -> None:
        """Raise `ModelError` for a block without fused attention."""
        if not self._calls:
            raise self._refusal("calls no torch.nn.functional.scaled_dot_product_attention")

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(f"{self._path} {reason}, so ranks cannot share its sequence: {_OR_FSDP2}")

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        shared = self._shared
        lengths = {given.shape[-2] for given in (query, key, value)}
        if lengths != {shared.part_length}:
            found = " and ".join(map(str, sorted(lengths)))
            raise self._refusal(f"attends with {found} tokens where a rank has {shared.part_length}")
        keys: Any = _Gathered.apply(key, shared.ranks)
        values: Any = _Gathered.apply(value, shared.ranks)
        how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if is_causal and _on_card(query):
            return _causal_in_pieces(query, keys, values, shared.ranks, how)
        if is_causal:
            attn_mask = shared.mask
            if attn_mask is None:
                raise self._refusal("is given a mask, and attends without it")
        if attn_mask is not None and attn_mask.shape[-1] != shared.length:
            raise self._refusal(f"makes a mask of shape {tuple(attn_mask.shape)} itself")
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=attn_mask, **how)


def _causal_in_pieces(query: Tensor, keys: Tensor, values: Tensor, ranks: _Ranks, how: dict[str, Any]) -> Tensor:
    """Causal attention of this rank's two pieces of queries, each to the keys up to its own end."""
    length = query.shape[-2] // 2
    found = []
    for part, piece in zip(query.split(length, -2), ranks.pieces(ranks.number), strict=True):
        end = (piece + 1) * length
        found.append(_ending_alike(part, keys.narrow(-2, 0, end), values.narrow(-2, 0, end), **how))
    return torch.cat(found, -2)


def _ending_alike(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention in which the last query sees the last key: by the flash kernel without a mask, where it runs.

    As `torch.nn.attention.bias.CausalBias` does it, which cannot be made while a dispatch mode is active.
    """
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    if can_use_flash_attention(SDPAParams(query, key, value, None, dropout_p, False, enable_gqa)):
        width = query.shape[-1]
        missing = -width % 8  # as PyTorch pads for this kernel
        padded = (F.pad(each, (0, missing)) if missing else each for each in (query, key, value))
        scale = width**-0.5 if scale is None else scale
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        return kernel(*padded, dropout_p, True, scale=scale)[0][..., :width]
    if enable_gqa:  # the other fused kernels take no groups
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    queries, keys = query.shape[-2], key.shape[-2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout_p, scale=scale)
