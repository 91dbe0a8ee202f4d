"""FlexAttention under `torch.compile` in a dry run: one operator forward and one backward, of which no kernel exists.

A dispatch mode does not see PyTorch's higher-order operator. What its kernels allocate is in
torch/_inductor/kernel/flex/flex_attention.py: forward the result, in its query's layout, and of each row the logarithm
of its sum and its maximum; backward the sums of the result times its gradient, and three gradients. Masks only decide
how many keys a query meets on average, and so the seconds.

`create_block_mask` without `torch.compile` makes the mask of all pairs, as it does on a card.
"""

import inspect
import math
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.errors import TraceError
from tightfit.runtime.internals import calls_of_compiled_functions, no_modes, without_dynamo
from tightfit.tracing.cuda.answers import simulated_card
from tightfit.tracing.cuda.replacements import Replacements
from tightfit.tracing.dry_run import running
from tightfit.tracing.unbacked import is_unbacked

_LIBRARY = torch.library.Library("tightfit", "FRAGMENT")
_LIBRARY.define("flex_attention(Tensor q, Tensor k, Tensor v, int keys) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    "flex_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, int keys) "
    "-> (Tensor, Tensor, Tensor)"
)
_FORWARD: Any = torch.ops.tightfit.flex_attention.default
_BACKWARD: Any = torch.ops.tightfit.flex_attention_backward.default


@torch.library.register_fake("tightfit::flex_attention", lib=_LIBRARY)
def _results(q: Tensor, k: Tensor, v: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _laid_as(q, v.shape[3]), rows, torch.empty_like(rows)


@torch.library.register_fake("tightfit::flex_attention_backward", lib=_LIBRARY)
def _gradients(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _laid_as(q, q.shape[3]), _laid_as(k, k.shape[3]), _laid_as(v, v.shape[3])


def _laid_as(like: Tensor, width: int) -> Tensor:
    """A dense tensor with the order of dimensions of another one, rows last, and rows of another width."""
    sizes = (*like.shape[:3], width)
    order = [3, *sorted(range(3), key=lambda dimension: (like.stride(dimension), -dimension))]
    strides, step = [0] * 4, 1
    for dimension in order:
        strides[dimension], step = step, step * sizes[dimension]
    return torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)


class _FlexAttention(torch.autograd.Function):
    """Attention of q (B, H, T, D) to k and v (B, Hkv, S, D), with its rows' sums and maxima (B, H, T).

    A query meets so many `keys` on average. Backward reads the `tables` of the mask too.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keys: int, *tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, sums, maxima = _FORWARD(q, k, v, keys)
        ctx.keys = keys
        ctx.save_for_backward(q, k, v, out, sums, *tables)
        ctx.mark_non_differentiable(maxima)
        return out, sums, maxima

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, *tables = ctx.saved_tensors
        made = _BACKWARD(gradients[0], q, k, v, out, sums, ctx.keys)
        return *made, None, *(None for _ in tables)


def replace_flex_attention(module: ModuleType, replacements: Replacements) -> None:
    """Let the step call these operators where a card is played, and say what helps where none is."""
    check, attend = getattr(module, "_validate_device", None), getattr(module, "flex_attention_hop", None)
    if check is None or attend is None:  # private: where they are gone, PyTorch's own words are left
        return

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if running() is None or not any(tensor.requires_grad for tensor in (query, key, value)):
            check(query, key, value)
        elif simulated_card() is None:
            raise TraceError(f"{_where()} needs a CUDA device to train on: name one, as device='rtx4090'")

    @without_dynamo
    def attend_dry(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Any, blocks: tuple, *rest: Any
    ) -> tuple[Tensor, ...]:
        if running() is None or simulated_card() is None:
            return attend(query, key, value, score_mod, blocks, *rest)
        if calls_of_compiled_functions() < 2:  # FlexAttention compiles its operator itself, to no kernel
            raise TraceError(
                f"{_where()} cannot run dry without torch.compile, as it would make the scores of all pairs: call "
                "torch.compile(flex_attention)"
            )
        if any(tensor.requires_grad for tensor in _tensors_of(score_mod)):
            raise TraceError(
                f"{_where()} cannot run dry with a score_mod that is trained: measure the script itself: "
                "tightfit run --device rtx4090 -- python train.py"
            )
        tables = [each for each in blocks if isinstance(each, Tensor)]
        return _FlexAttention.apply(query, key, value, _keys_met(blocks, key.shape[2]), *tables)

    def warn_once(warning_id: str, *args: Any, **kwargs: Any) -> None:
        if warning_id != "flex_attention_performance" or running() is None:  # it is compiled where it counts
            warn(warning_id, *args, **kwargs)

    warn: Any = getattr(module, "_warn_once", None)
    if warn is not None:
        replacements.replace(module, "_warn_once", warn_once)
    replace_block_masks(module, replacements)
    replacements.replace(module, "_validate_device", validate)
    replacements.replace(module, "flex_attention_hop", attend_dry)


def replace_block_masks(module: ModuleType, replacements: Replacements) -> None:
    """Let `create_block_mask` under `torch.compile` make its tables without the mask of all pairs.

    The compiler fuses the mask into the sums over its blocks. Here three rows and three columns stand for a block.
    """
    make, count = getattr(module, "create_mask", None), getattr(module, "_convert_mask_to_block_mask", None)
    if make is None or count is None:
        return

    @without_dynamo
    def make_mask(mod_fn: Any, *sizes: Any, **named: Any) -> Any:
        fused = running() is not None and calls_of_compiled_functions() > 0 and _makes_block_mask()
        return _FusedMask(mod_fn, sizes, named) if fused else make(mod_fn, *sizes, **named)

    @without_dynamo
    def count_blocks(mask: Any, Q_BLOCK_SIZE: int, KV_BLOCK_SIZE: int, *rest: Any, **named: Any) -> Any:
        if not isinstance(mask, _FusedMask):
            return count(mask, Q_BLOCK_SIZE, KV_BLOCK_SIZE, *rest, **named)
        batch, heads, queries, keys, *device = mask.sizes

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask.function(b, h, _nth(i, Q_BLOCK_SIZE, queries), _nth(j, KV_BLOCK_SIZE, keys))

        rows, columns = 3 * -(-queries // Q_BLOCK_SIZE), 3 * -(-keys // KV_BLOCK_SIZE)
        return count(make(seen, batch, heads, rows, columns, *device, **mask.named), 3, 3, *rest, **named)

    replacements.replace(module, "create_mask", make_mask)
    replacements.replace(module, "_convert_mask_to_block_mask", count_blocks)


def _makes_block_mask() -> bool:
    """True if `create_block_mask` asks for the mask: others want the mask itself."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "create_block_mask":
        frame = frame.f_back
    return frame is not None


class _FusedMask(NamedTuple):
    """A mask that the compiler does not write to memory: its function, and the sizes for which it was asked."""

    function: Any
    sizes: tuple[Any, ...]
    named: dict[str, Any]


def _nth(index: Tensor, block: int, length: int) -> Tensor:
    """The position of the first, the middle and the last row of each block, by the number among these rows."""
    return (index // 3 * block + index % 3 * (block - 1) // 2).clamp(max=length - 1)


def _keys_met(blocks: tuple, keys: int) -> int:
    """How many of the keys a query meets on average, from the tables of a `BlockMask`; all where they are not known."""
    _, _, seen, _, seen_whole, *_, width, _ = blocks
    counts = [table for table in (seen, seen_whole) if table is not None]
    if any(map(is_unbacked, counts)):
        return keys
    with no_modes():
        met = sum(table.double().mean().item() for table in counts) * width
    return min(keys, math.ceil(met))


def _where() -> str:
    dry = running()
    return f"torch.nn.attention.flex_attention in {(dry and dry.modules.current) or 'the step'}"


def _tensors_of(function: Any) -> list[Tensor]:
    """The tensors that a function reads from around it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    around = inspect.getclosurevars(function)
    return [value for value in (*around.nonlocals.values(), *around.globals.values()) if isinstance(value, Tensor)]
