"""Linear layer and cross-entropy together, with the logits of a few tokens at a time.

For a mean or a sum, forward computes the gradients chunk by chunk, while a chunk's logits exist. That saves a second
product with the vocabulary. For `reduction="none"` the tokens' weights are unknown before backward, so the chunks run
again there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._chunked_head import Gradients, Head, Terms, Tokens, accumulation_dtype, run_chunks
from tightfit.ops._once import differentiable_once
from tightfit.runtime.internals import graph_is_kept

__all__ = ["linear_cross_entropy", "plain_linear_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]

# The default size gives a chunk's logits at least this many bytes: smaller chunks only cost time.
LEAST_CHUNK_BYTES = 4 * 2**20
# Each chunk reads and writes the gradient of the weight, which is slow for few rows. Time relative to the plain version
# on one core (fp32, 1024 tokens, D 1024, V 32000): D/64 rows 0.97, D/16 0.73, D/8 0.67, D/4 0.63, D/2 0.64.
LEAST_ROWS_PER_HIDDEN = 1 / 8


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias` against `labels`, without materialising the logits of all tokens.

    - hidden (N, D), weight (V, D), bias (V,): one floating dtype. Under autocast the dtypes may differ, and products
      are in the autocast dtype.
    - labels (N,): integers in [0, V), or `ignore_index`. Ignored tokens are dropped before any product.

    The loss is fp32 (fp64 for fp64 inputs): a scalar for "mean" (over the tokens that are not ignored) and "sum", (N,)
    for "none", with zeros for ignored tokens. Sums over tokens, those of gradients too, are computed in fp32. If every
    label is ignored, the loss is zero with zero gradients, for "mean" too, and not NaN.

    With logits l and label y, the loss of a token is lse(l) - l_y. `label_smoothing` e mixes in the uniform
    distribution: (1 - e) (lse(l) - l_y) + e (lse(l) - mean(l)) (Szegedy et al. 2016). z_loss adds z_loss * lse(l)²
    (PaLM, Chowdhery et al. 2022).

    `chunk_size` is the number of tokens whose logits exist at a time; for None see `default_chunk_size`. Raises
    `InputError` for shapes, dtypes, labels or options that do not fit. Cannot be differentiated twice.

    Example:
        >>> import torch
        >>> from tightfit.ops import linear_cross_entropy
        >>> hidden, weight, labels = torch.randn(64, 16), torch.randn(100, 16), torch.randint(100, (64,))
        >>> loss = linear_cross_entropy(hidden, weight, labels, chunk_size=16)  # logits of 16 tokens at a time
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
        True
    """
    terms = Terms(ignore_index, label_smoothing, z_loss)
    check_shapes(hidden, weight, bias, labels)
    check_options(reduction, terms, chunk_size)
    dtype = product_dtype(hidden)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and dtype == hidden.dtype and tensor.dtype != dtype:
            raise InputError(
                f"linear_cross_entropy: hidden is {hidden.dtype}, {name} is {tensor.dtype}: give both one dtype"
            )
    return chunked_loss(hidden, weight, bias, labels, terms, reduction, chunk_size, dtype)


def plain_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The reference: the same loss from the logits of all tokens."""
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if z_loss == 0:
        return loss
    valid = labels != ignore_index
    penalty = z_loss * torch.where(valid, logits.logsumexp(dim=1), 0).square()
    if reduction == "none":
        return loss + penalty
    return loss + (penalty.sum() / valid.sum() if reduction == "mean" else penalty.sum())


def default_chunk_size(tokens: int, hidden_size: int, vocabulary: int) -> int:
    """The default number of tokens in a chunk.

    A chunk's fp32 logits have about as many bytes as the hidden states in fp32, or 4 MiB if that is more. A chunk has
    at least an eighth of the hidden size in rows.
    """
    logits_bytes = max(4 * tokens * hidden_size, LEAST_CHUNK_BYTES)
    rows = max(logits_bytes // (4 * vocabulary), int(hidden_size * LEAST_ROWS_PER_HIDDEN), 1)
    return min(rows, max(tokens, 1))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which `F.linear` would compute here: autocast's, except for fp64."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    terms: Terms,
    reduction: str,
    chunk_size: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """`linear_cross_entropy` on checked inputs, with products in `dtype`."""
    tokens = Tokens(labels, terms.ignore_index)
    check_labels(tokens, len(weight))
    rows = chunk_size or default_chunk_size(tokens.count, weight.shape[1], len(weight))
    loss: Any
    if reduction == "none":
        loss = TokenLosses.apply(hidden, weight, bias, tokens, terms, rows, dtype)
    else:
        divisor = max(tokens.count, 1) if reduction == "mean" else 1  # with every label ignored: 0 / 1, not 0 / 0
        loss = TotalLoss.apply(hidden, weight, bias, tokens, terms, rows, dtype, divisor, torch.is_grad_enabled())
    return loss


def check_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or labels.dim() != 1:
        raise InputError(f"linear_cross_entropy: {shapes}: give hidden (N, D), weight (V, D) and labels (N,)")
    if hidden.shape[1] != weight.shape[1] or len(hidden) != len(labels):
        raise InputError(f"linear_cross_entropy: {shapes} do not fit: hidden is (N, D), weight (V, D), labels (N,)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"linear_cross_entropy: bias {tuple(bias.shape)}, weight {tuple(weight.shape)}: bias is (V,)")
    if not hidden.is_floating_point():
        raise InputError(f"linear_cross_entropy: hidden is {hidden.dtype}: give a floating-point tensor")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"linear_cross_entropy: labels are {labels.dtype}: give class indices as integers")


def check_options(reduction: str, terms: Terms, chunk_size: int | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"linear_cross_entropy: reduction={reduction!r} is unknown: use 'mean', 'sum' or 'none'")
    if not 0 <= terms.label_smoothing <= 1:
        raise InputError(f"linear_cross_entropy: label_smoothing={terms.label_smoothing} is not between 0 and 1")
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"linear_cross_entropy: chunk_size={chunk_size} is less than 1: give a number of tokens")


def check_labels(tokens: Tokens, vocabulary: int) -> None:
    wrong = tokens.outside(vocabulary)
    if wrong is not None:
        raise InputError(
            f"linear_cross_entropy: label {wrong} is outside the vocabulary of {vocabulary}: "
            f"labels are 0 to {vocabulary - 1}, or ignore_index"
        )


class TotalLoss(torch.autograd.Function):
    """The sum of the token losses, divided by `divisor`. Forward computes its gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        terms: Terms,
        rows: int,
        dtype: torch.dtype,
        divisor: int,
        recording: bool,
    ) -> Tensor:
        # In fp16 the small gradients of a mean would underflow, so backward divides instead.
        inside = divisor if dtype != torch.float16 else 1
        ctx.divisor = divisor / inside
        ctx.dtypes = dtypes(hidden, weight, bias)
        needed = [recording and need for need in ctx.needs_input_grad[:3]]
        # The dtypes of products and sums are chosen here. Autocast would cast the fp32 buffers back to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, dtype)
            gradients = Gradients(hidden, weight, bias, needed) if any(needed) else None
            scale = torch.full((tokens.count, 1), 1 / inside, dtype=head.accumulate, device=hidden.device)
            losses = run_chunks(head, tokens, terms, rows, scale, gradients)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        return (losses.sum() / divisor).to(head.accumulate)

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0] / ctx.divisor
        # Scaled in place: a second copy of the weight's gradient would raise the peak of the step.
        multiply = torch.mul if graph_is_kept() else torch.Tensor.mul_
        scaled = [None if gradient is None else multiply(gradient, scale) for gradient in ctx.saved_tensors]
        return (*cast(scaled, ctx.dtypes), None, None, None, None, None, None)


class TokenLosses(torch.autograd.Function):
    """The loss of each token, zero if ignored. The chunks run again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        terms: Terms,
        rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.tokens, ctx.terms, ctx.rows, ctx.dtype = tokens, terms, rows, dtype
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, dtype)
            losses = run_chunks(head, tokens, terms, rows)
        return tokens.spread(losses.to(head.accumulate))

    @staticmethod
    @differentiable_once("linear_cross_entropy")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, ctx.dtype)
            made = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
            scale = ctx.tokens.gather(gradients[0]).unsqueeze(1).to(accumulation_dtype(ctx.dtype))
            run_chunks(head, ctx.tokens, ctx.terms, ctx.rows, scale, made)
        sums = [made.hidden, made.weight, made.bias]
        return (*cast(sums, dtypes(hidden, weight, bias)), None, None, None, None)


def dtypes(*tensors: Tensor | None) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def cast(tensors: Sequence[Tensor | None], to: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor, dtype in zip(tensors, to, strict=True)]
