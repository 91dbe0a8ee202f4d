"""Tries on real numbers whether tokens of a block meet elsewhere than in attention.

A rank of context parallel runs a block on a part of the tokens, which is right only if all but attention treats each
token by itself. Some ways to meet have no name that could be looked for: a slice that shifts tokens, a reshape, a sum.
So the block runs three times without gradients, with an attention that hands each token its own value: as it is, and
with the first and the second half of the tokens changed. What the other half returns may not change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tightfit.levers.recompute.generators import default_generator
from tightfit.runtime.outside import outside_training

# Of the largest number: products of other shapes (tokens that change their expert) round differently. A token that
# meets another one changes by as much as it is large.
_NOTICED = {torch.float64: 1e-6, torch.float32: 1e-3}
_NOTICED_IN_16_BITS = 3e-2


class _OwnValue(TorchFunctionMode):
    """A context in which fused attention returns each token's own value, (..., heads of the queries, T, D)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        query, value = given["query"], given["value"]
        return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)


def tokens_meet(block: nn.Module, forward: Callable[[Tensor], Tensor], hidden: Tensor) -> bool:
    """True if a half of the tokens changes what a block returns for the other half, attention left out.

    `forward` runs the block on hidden states (B, T, D), T at least 2, and returns those of the same shape. The block's
    buffers and the random generators are as before afterwards.
    """
    half = hidden.shape[1] // 2
    halves = slice(0, half), slice(half, None)
    with outside_training(), torch.no_grad(), _restored(block, hidden.device), _OwnValue():
        plain = _drawn_alike(forward, hidden)
        limit = _NOTICED.get(plain.dtype, _NOTICED_IN_16_BITS) * float(plain.abs().max())
        for changed, other in (halves, halves[::-1]):
            tried = hidden.clone()
            tried[:, changed] = 1 - 2 * tried[:, changed]
            moved = (_drawn_alike(forward, tried)[:, other] - plain[:, other]).abs().max()
            if not float(moved) <= limit:  # nor NaN
                return True
    return False


def _drawn_alike(forward: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The results of a forward whose dropout draws the same numbers each time."""
    default_generator(hidden.device).manual_seed(0)
    return forward(hidden)


@contextmanager
def _restored(block: nn.Module, device: torch.device) -> Iterator[None]:
    """A context after which buffers and random generators are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in block.buffers()]
    versions = [buffer._version for buffer, _ in buffers]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for (buffer, before), version in zip(buffers, versions, strict=True):
        if buffer._version != version:
            buffer.copy_(before)
