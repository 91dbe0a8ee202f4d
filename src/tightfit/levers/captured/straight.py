"""Runs the programs of a captured block as one node of autograd.

AOTAutograd's own wrapper serves every block, and takes as long as thirty small operators. This one serves blocks whose
inputs and results are plain tensors that share no memory.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightfit.errors import CompileError
from tightfit.levers.captured.program import as_in_forward
from tightfit.runtime.internals import NoAutocast, RecordedCall, function_switches, graph_is_kept

Program = Callable[[list[Any]], Any]


class TensorLike(NamedTuple):
    """A tensor without its data. The dtype and device are those of the tensor that it was recorded from."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLike":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def zeros(self) -> torch.Tensor:
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return empty.zero_()


@dataclass
class ProgramParts:
    """The programs of one captured graph."""

    forward: Program
    backward: Program
    count: int  # of the inputs
    detached: tuple[int, ...]  # places of saved views of results: autograd would make a cycle of them
    tangents: tuple[TensorLike, ...]  # the gradients that backward was recorded with
    used_up: tuple[int, ...] = ()  # places of saved tensors into which backward writes
    again: tuple[int, ...] = ()  # places of inputs, once for each further gradient that backward returns at the end
    # Backward where some tangents are undefined. None for programs of the compiler, which count on the strides of all.
    partly: Callable[[frozenset[int]], Program] | None = None
    sources: tuple[frozenset[int] | None, ...] = ()  # for each returned gradient the tangents that it depends on


def straight(parts: ProgramParts, call: RecordedCall, *, under_autocast: bool) -> Callable[..., Any]:
    """A function of the graph's inputs that returns its results."""
    first, given = len(call.written), dict(call.inputs)
    returns = first + len(call.differentiable)
    plain = [place for place, differs in enumerate(call.differentiable) if not differs]
    with_gradient = [place for place, differs in enumerate(call.differentiable) if differs]
    as_recorded = tuple(zip(with_gradient, parts.tangents, strict=True))
    aside = NoAutocast if under_autocast else nullcontext  # the casts are operators of the programs

    class CapturedBlock(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.set_materialize_grads(False)
            ctx.switches = function_switches()
            ctx.waits = True  # for backward
            arguments = list(inputs[: parts.count])
            with aside():
                results = parts.forward(arguments)
            saved = results[returns:]
            if parts.detached:
                saved = tuple(s.detach() if place in parts.detached else s for place, s in enumerate(saved))
            ctx.save_for_backward(*saved)
            for place, content in zip(call.written, results, strict=False):
                inputs[place].copy_(content)
            outputs = results[first:returns]
            if call.unsafe_views:
                outputs = tuple(
                    torch.ops.aten._unsafe_view.default(o, o.shape) if place in call.unsafe_views else o
                    for place, o in enumerate(outputs)
                )
            if call.inputs:
                outputs = tuple(None if place in given else each for place, each in enumerate(outputs))
            if plain:
                ctx.mark_non_differentiable(*(outputs[p] for p in plain if isinstance(outputs[p], torch.Tensor)))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise CompileError(
                    "a captured block gives no gradients of gradients: leave it out, or use "
                    "tightfit.recompute(..., captured=False)"
                )
            missing = frozenset(number for number, (place, _) in enumerate(as_recorded) if gradients[place] is None)
            if len(missing) == len(as_recorded):
                return (None,) * len(parts.sources)
            arguments = [*ctx.saved_tensors]
            if parts.used_up and graph_is_kept():
                arguments = [a.clone() if place in parts.used_up else a for place, a in enumerate(arguments)]
            ctx.maybe_clear_saved_tensors()
            ctx.waits = False
            for place, like in as_recorded:
                gradient = gradients[place]
                if gradient is None:
                    gradient = like.zeros()
                # Eager code computes with the gradient as it is laid out: sums over a copy would round differently.
                is_alike = parts.partly is not None or gradient.stride() == like.stride
                arguments.append(gradient if is_alike else laid_out(gradient, like.stride))
            del gradients
            with aside(), as_in_forward(ctx.switches):
                program = parts.backward if not missing or parts.partly is None else parts.partly(missing)
                found = tuple(program(arguments))
            if not missing:
                return found
            # Eager code reaches nothing from a result that nobody reads: no gradient there, and not one of zeros.
            pairs = zip(found, parts.sources, strict=True)
            return tuple(None if own and own <= missing else each for each, own in pairs)

    # What has no gradient is no input for autograd: backward would go on from it with a gradient of zeros.
    unread = {place for place, own in enumerate(parts.sources[: parts.count]) if own is None}
    if not parts.again and not unread and not given:
        return CapturedBlock.apply

    # Autograd adds up the gradients of an input's readers one after the other, those of other blocks between them. So
    # an input that the block reads twice is given twice, and its two gradients are not added here.
    def run(*inputs: Any) -> Any:
        if unread:
            inputs = tuple(
                each.detach() if place in unread and isinstance(each, torch.Tensor) and each.requires_grad else each
                for place, each in enumerate(inputs)
            )
        results = CapturedBlock.apply(*inputs, *[inputs[place] for place in parts.again])
        if not given:
            return results
        return tuple(inputs[given[place]] if place in given else each for place, each in enumerate(results))

    return run


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
