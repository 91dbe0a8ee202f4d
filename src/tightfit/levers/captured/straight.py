"""Runs the programs of a captured block as one node of autograd.

AOTAutograd's own wrapper serves every block, and takes as long as thirty small operators. This one serves blocks whose
inputs and results are plain tensors that share no memory.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.errors import LeverError
from tightfit.runtime.internals import NoAutocast, RecordedCall, graph_is_kept

Program = Callable[[list[Any]], Any]


@dataclass
class Parts:
    """The programs of one captured graph."""

    forward: Program
    backward: Program
    count: int  # of the inputs
    detached: tuple[int, ...]  # places of saved views of results: autograd would make a cycle of them
    tangents: tuple[tuple[int, ...], ...]  # strides of the gradients that backward was recorded with
    used_up: tuple[int, ...] = ()  # places of saved tensors into which backward writes


def straight(parts: Parts, call: RecordedCall, *, under_autocast: bool) -> Callable[..., Any]:
    """A function of the graph's inputs that returns its results."""
    returns = len(call.differentiable)
    plain = [place for place, differs in enumerate(call.differentiable) if not differs]
    with_gradient = [place for place, differs in enumerate(call.differentiable) if differs]
    as_recorded = tuple(zip(with_gradient, parts.tangents, strict=True))
    aside = NoAutocast if under_autocast else nullcontext  # the casts are operators of the programs

    class CapturedBlock(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            arguments = list(inputs)
            with aside():
                results = parts.forward(arguments)
            saved = results[returns:]
            if parts.detached:
                saved = tuple(s.detach() if place in parts.detached else s for place, s in enumerate(saved))
            ctx.save_for_backward(*saved)
            outputs = results[:returns]
            if call.unsafe_views:
                outputs = tuple(
                    torch.ops.aten._unsafe_view.default(o, o.shape) if place in call.unsafe_views else o
                    for place, o in enumerate(outputs)
                )
            if plain:
                ctx.mark_non_differentiable(*(outputs[p] for p in plain if isinstance(outputs[p], torch.Tensor)))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise LeverError(
                    "a captured block gives no gradients of gradients: leave it out, or use tightfit.recompute"
                )
            arguments = [*ctx.saved_tensors]
            if parts.used_up and graph_is_kept():
                arguments = [a.clone() if place in parts.used_up else a for place, a in enumerate(arguments)]
            ctx.maybe_clear_saved_tensors()
            for place, strides in as_recorded:
                gradient = gradients[place]
                arguments.append(gradient if gradient.stride() == strides else laid_out(gradient, strides))
            del gradients
            with aside():
                return tuple(parts.backward(arguments))

    return CapturedBlock.apply


def laid_out(gradient: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of a gradient with other strides, unless they only differ where a size is 1."""
    differs = any(
        own != expected
        for size, own, expected in zip(gradient.shape, gradient.stride(), strides, strict=True)
        if size > 1
    )
    if not differs:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
