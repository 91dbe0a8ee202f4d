"""The lever chunked loss on an unmodified model: head and cross-entropy together, on the logits of some tokens at a
time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError
from tightfit.levers.deferred_logits import DeferredHead, DeferredLogits
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.region import FrugalForward
from tightfit.ops.head_loss import product_dtype


class DeferringForward(FrugalForward):
    """Replaces the forward of a linear head. Its product is materialised only on use."""

    def __init__(self, module: nn.Module, path: str, chunk_size: int | None):
        super().__init__(module, path)
        self.chunk_size = chunk_size
        self.also_without_gradients = False

    def __call__(self, input: torch.Tensor) -> Any:
        head = self.module
        assert isinstance(head, nn.Linear), "the lever is put on linear heads only"
        # `torch.compile` sees the plain head: it cannot trace the deferred tensor, and fuses the loss itself.
        if torch.compiler.is_compiling() or not self._defers(head, input):
            return self.original(input)
        made = DeferredHead(input, head.weight, head.bias, self.chunk_size)
        return DeferredLogits.of(made, input, made.dtype)

    def _defers(self, head: nn.Linear, input: torch.Tensor) -> bool:
        if self.also_without_gradients and not torch.is_grad_enabled():
            return not self.removed and is_plain_product(head, input)
        return not self.steps_aside and can_defer(head, input)


@contextmanager
def chunks_without_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, a head under the lever also defers its logits where no gradients are recorded.

    An evaluation that computes a cross-entropy then needs no more memory than a training step. Heads without the lever
    stay as they are.
    """
    heads = [f for m in model.modules() if isinstance(f := m.__dict__.get("forward"), DeferringForward)]
    for head in heads:
        head.also_without_gradients = True
    try:
        yield
    finally:
        for head in heads:
            head.also_without_gradients = False


class NeededLogits(DeferringForward):
    """Defers logits under `torch.no_grad`, for an evaluation that reads the logits of a few tokens."""

    def _defers(self, head: nn.Linear, input: torch.Tensor) -> bool:
        return not self.removed and not torch.is_grad_enabled() and is_plain_product(head, input)


def can_defer(head: nn.Linear, hidden: torch.Tensor) -> bool:
    """True if gradients are recorded, and `F.linear` accepts the operands as plain tensors."""
    # Without gradients nothing would save the logits for backward, so deferring them gains nothing.
    tensors = _tensors(head, hidden)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    return is_plain_product(head, hidden)


def _tensors(head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [hidden, head.weight] if head.bias is None else [hidden, head.weight, head.bias]


def is_plain_product(head: nn.Linear, hidden: torch.Tensor) -> bool:
    """True if `F.linear` accepts the operands, and all of them are plain tensors."""
    tensors = _tensors(head, hidden)
    plain = all(type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta for tensor in tensors)
    fits = hidden.dim() >= 2 and hidden.shape[-1] == head.weight.shape[-1]
    one_dtype = product_dtype(hidden) != hidden.dtype or all(tensor.dtype == hidden.dtype for tensor in tensors)
    return plain and fits and one_dtype and hidden.is_floating_point()


def apply_chunked_loss(model: nn.Module, head_path: str, chunk_size: int | None = None) -> Applied:
    """Compute the cross-entropy of a head's output without materialising all its logits.

    `head_path` is the path of the `nn.Linear` that computes the logits (..., V). `chunk_size` is the number of tokens
    whose logits exist at a time; None: `linear_cross_entropy` chooses. While gradients are recorded the head returns
    `DeferredLogits`. The model and its caller can use them as before; any use except views and a cross-entropy
    materialises them. A cross-entropy with every label ignored is 0, not NaN.

    Returns a handle with `undo()`. Raises `LeverError` if the module is no plain linear layer, if its forward is
    already replaced, or if `chunk_size` is less than 1.
    """
    return _applied(DeferringForward, model, head_path, chunk_size)


def apply_needed_logits(model: nn.Module, head_path: str, chunk_size: int | None = None) -> Applied:
    """Let an evaluation compute only the logits that it reads. Works under `torch.no_grad`.

    Arguments, result and errors are those of `apply_chunked_loss`.
    """
    return _applied(NeededLogits, model, head_path, chunk_size)


def _applied(kind: type[DeferringForward], model: nn.Module, head_path: str, chunk_size: int | None) -> Applied:
    try:
        head = model.get_submodule(head_path)
    except AttributeError:
        raise LeverError(f"chunked loss: the model has no module {head_path!r}") from None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise LeverError(
            f"chunked loss: {head_path} is a {type(head).__name__}, wanted the nn.Linear that makes the logits"
        )
    if "forward" in head.__dict__:
        raise LeverError(f"chunked loss: the forward of {head_path} is already replaced: undo that first")
    if chunk_size is not None and chunk_size < 1:
        raise LeverError(f"chunked loss: chunk_size {chunk_size} is not at least 1")
    forward = kind(head, head_path, chunk_size)
    forward.install()
    return Applied([forward])
