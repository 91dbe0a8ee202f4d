"""Runs a tokenwise function over the sequence tile by tile.

Forward saves only the input. Backward runs each tile again, with a graph and the same random numbers, and sums the
gradients of the weights (as Bekman et al. 2025, "Arctic Long Sequence Training", tile feed-forwards). The function's
saved tensors and temporaries exist for one tile at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.errors import InputError
from tightfit.ops._once import differentiable_once
from tightfit.runtime.internals import function_switches, switched_as, without_dynamo

__all__ = ["tiled"]


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tokens: int, weights: Iterable[nn.Parameter]) -> Tensor:
    """Compute function(x) over `tokens` tokens of x at a time, equal to rounding.

    The function's forward runs again in backward. With more than one tile, the result cannot be differentiated twice.

    Args:
        function: A function (B, t, n) -> (B, t, m) that treats each token by itself. Of tensors that require a
            gradient, it may read only x and the `weights`.
        x: (B, T, n).
        tokens: The number of tokens at a time, at least 1.
        weights: The parameters that the function reads.

    Returns:
        (B, T, m).

    Raises:
        InputError: x does not have three dimensions, or `tokens` is less than 1.

    Example:
        >>> import torch
        >>> from tightfit.ops import tiled
        >>> mlp, x = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)), torch.randn(2, 64, 8)
        >>> torch.allclose(tiled(mlp, x, 16, mlp.parameters()), mlp(x), atol=1e-6)
        True
    """
    if x.dim() != 3:
        raise InputError(f"tiled: x {tuple(x.shape)} does not have three dimensions: give (B, T, n)")
    if tokens < 1:
        raise InputError(f"tiled: tokens={tokens} is less than 1: give the tokens of one tile")
    if x.shape[1] <= tokens:
        return function(x)
    return _run(function, tokens, x, [weight for weight in weights if weight.requires_grad])


# A compiled block runs in parts around its tiles: PyTorch's compiler would break within them, warn of settings that it
# cannot read, and compile pieces of a forward that backward repeats as eager code.
@without_dynamo
def _run(function: Callable[[Tensor], Tensor], tokens: int, x: Tensor, weights: list[nn.Parameter]) -> Tensor:
    result: Any = Tiled.apply(function, tokens, x, *weights)
    return result


class Tiled(torch.autograd.Function):
    """See `tiled`. Saves x and the weights."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], tokens: int, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.how = function, tokens
        before = random_state(x.device)
        ctx.switches = function_switches()
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        out = torch.cat([function(part) for part in x.split(tokens, dim=1)], dim=1)
        # Kept only if the function drew random numbers (dropout). Else backward has nothing to repeat.
        ctx.random = None if before == random_state(x.device) else before
        return out

    @staticmethod
    @differentiable_once("tiled")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        sums: list[Tensor | None] = [None] * len(weights)
        with nullcontext() if ctx.random is None else random_numbers_from(ctx.random, x.device):
            for first in range(0, x.shape[1], ctx.how[1]):
                rows = slice(first, first + ctx.how[1])
                of_part, *made = gradients_of_tile(ctx, x[:, rows], weights, gradients[0][:, rows])
                if of_x is not None:
                    of_x[:, rows] = 0 if of_part is None else of_part
                sums = [grown(total, more) for total, more in zip(sums, made, strict=True)]
                del of_part, made  # a tile's gradients must not live while the next tile runs
        return (None, None, of_x, *sums)


def random_state(device: torch.device) -> bytes:
    """The state of the device's generator as bytes, which the allocator does not count."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.numpy().tobytes()


@contextmanager
def random_numbers_from(state: bytes, device: torch.device) -> Iterator[None]:
    """A context that draws random numbers from this state. Afterwards the generator is as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        saved = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved, device)
        else:
            torch.set_rng_state(saved)
        yield


def gradients_of_tile(ctx: Any, part: Tensor, weights: list[Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a tile's input and of the weights, from the gradient of its output."""
    enabled, dtype = ctx.autocast
    part = part.detach().requires_grad_()
    # Without autocast's cache, which holds casts of the weights that forward made without a graph.
    cast = torch.autocast(part.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)
    with torch.enable_grad(), cast, switched_as(ctx.switches):
        out = ctx.how[0](part)
    return torch.autograd.grad(out, [part, *weights], gradient, allow_unused=True)


def grown(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """total + more, written over `total`, which nothing else holds."""
    if more is None:
        return total
    # Cloned: autograd may return one tensor as the gradient of both operands of a sum.
    return more.clone() if total is None else total.add_(more)
