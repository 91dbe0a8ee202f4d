"""A loss over a linear head as a node of autograd, with the logits of a few tokens at a time.

For a mean or a sum, forward computes the gradients chunk by chunk, while a chunk's logits exist. That saves a second
product with the vocabulary. For `reduction="none"` the tokens' weights are unknown before backward, so the chunks run
again there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._card_head import rows_on_a_card, run_chunks_on_a_card
from tightfit.ops._chunked_head import (
    Gradients,
    Head,
    TokenLoss,
    Tokens,
    accumulation_dtype,
    on_cuda,
    run_chunks,
    writes_wider,
)
from tightfit.ops._once import differentiable_once
from tightfit.runtime.internals import graph_is_kept, without_dynamo

Reduction = Literal["mean", "sum", "none"]

# The default size gives a chunk's logits at least this many bytes: smaller chunks only cost time.
LEAST_CHUNK_BYTES = 4 * 2**20
# Each chunk reads and writes the gradient of the weight, which is slow for few rows. Time relative to the plain version
# on one core (fp32, 1024 tokens, D 1024, V 32000): D/64 rows 0.97, D/16 0.73, D/8 0.67, D/4 0.63, D/2 0.64.
LEAST_ROWS_PER_HIDDEN = 1 / 8


def default_chunk_size(tokens: int, hidden_size: int, vocabulary: int, *, on_a_card: bool = False) -> int:
    """The default number of tokens in a chunk.

    A chunk's fp32 logits have about as many bytes as the hidden states in fp32, or 4 MiB if that is more. A chunk has
    at least an eighth of the hidden size in rows. On a card it is a sixteenth of the tokens.
    """
    if on_a_card:
        return max(min(rows_on_a_card(tokens), tokens), 1)
    logits_bytes = max(4 * tokens * hidden_size, LEAST_CHUNK_BYTES)
    rows = max(logits_bytes // (4 * vocabulary), int(hidden_size * LEAST_ROWS_PER_HIDDEN), 1)
    return min(rows, max(tokens, 1))


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which `F.linear` would compute here: autocast's, except for fp64."""
    device = hidden.device.type
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def widened(tensor: Tensor) -> Tensor:
    """In the dtype of sums: at least fp32."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def reduced(losses: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The losses of all tokens, zero for ignored ones, as `reduction` says."""
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum().clamp(min=1) if reduction == "mean" else losses.sum()


@without_dynamo  # a loop over chunks, whose backward asks autograd's engine what no compiler can
def chunked_loss(
    loss: TokenLoss,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tokens,
    reduction: Reduction,
    rows: int,
    targets: Sequence[Tensor | None] = (),
) -> Tensor:
    """The loss of checked inputs, in chunks of `rows` tokens. No gradient reaches `targets`."""
    dtype = product_dtype(hidden)
    made: Any
    if reduction == "none":
        made = TokenLosses.apply(hidden, weight, bias, tokens, loss, rows, dtype, *targets)
    else:
        divisor = max(tokens.count, 1) if reduction == "mean" else 1  # with every label ignored: 0 / 1, not 0 / 0
        recording = torch.is_grad_enabled()
        made = TotalLoss.apply(hidden, weight, bias, tokens, loss, rows, dtype, divisor, recording, *targets)
    return made


def check_head(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    """Raise `InputError` unless the inputs are a linear head's, and the labels its tokens'."""
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or labels.dim() != 1:
        raise InputError(f"{name}: {shapes}: give hidden (N, D), weight (V, D) and labels (N,)")
    if hidden.shape[1] != weight.shape[1] or len(hidden) != len(labels):
        raise InputError(f"{name}: {shapes} do not fit: hidden is (N, D), weight (V, D), labels (N,)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{name}: bias {tuple(bias.shape)}, weight {tuple(weight.shape)}: bias is (V,)")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"{name}: labels are {labels.dtype}: give class indices as integers")
    check_dtypes(name, hidden=hidden, weight=weight, bias=bias)


def check_dtypes(name: str, **tensors: Tensor | None) -> None:
    """Raise `InputError` unless a product of the tensors has one dtype. The first are the hidden states."""
    (first, hidden), *others = tensors.items()
    assert hidden is not None, "the first tensor is the hidden states"
    if not hidden.is_floating_point():
        raise InputError(f"{name}: {first} is {hidden.dtype}: give a floating-point tensor")
    dtype = product_dtype(hidden)
    for other, tensor in others:
        if tensor is not None and dtype == hidden.dtype and tensor.dtype != dtype:
            raise InputError(f"{name}: {first} is {hidden.dtype}, {other} is {tensor.dtype}: give both one dtype")


def check_options(name: str, reduction: str, chunk_size: int | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"{name}: reduction={reduction!r} is unknown: use 'mean', 'sum' or 'none'")
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"{name}: chunk_size={chunk_size} is less than 1: give a number of tokens")


def check_labels(name: str, tokens: Tokens, vocabulary: int) -> None:
    wrong = tokens.outside(vocabulary)
    if wrong is not None:
        raise InputError(
            f"{name}: label {wrong} is outside the vocabulary of {vocabulary}: "
            f"labels are 0 to {vocabulary - 1}, or ignore_index"
        )


def runs_on_a_card(head: Head, loss: TokenLoss) -> bool:
    """True if the loop for cards serves: 16-bit products on CUDA, without a bias, and a plain cross-entropy."""
    is_narrow = head.weight.dtype.itemsize == 2 and head.bias is None
    return is_narrow and writes_wider(head.hidden, head.weight.dtype) and getattr(loss, "is_plain", False)


class TotalLoss(torch.autograd.Function):
    """The sum of the token losses, divided by `divisor`. Forward computes its gradients too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        loss: TokenLoss,
        rows: int,
        dtype: torch.dtype,
        divisor: int,
        recording: bool,
        *targets: Tensor | None,
    ) -> Tensor:
        ctx.name, ctx.others = loss.name, 6 + len(targets)
        ctx.dtypes = dtypes(hidden, weight, bias)
        needed = [recording and need for need in ctx.needs_input_grad[:3]]
        # The dtypes of products and sums are chosen here. Autocast would cast the fp32 buffers back to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, dtype)
            on_a_card = any(needed) and runs_on_a_card(head, loss)
            # In fp16 the small gradients of a mean would underflow, and on a card a pass over them is saved: there
            # backward divides instead.
            inside = 1 if dtype == torch.float16 or on_a_card else divisor
            ctx.divisors = [divisor / inside] * 3
            if on_a_card:
                gradients, losses, is_divided = run_chunks_on_a_card(head, tokens, rows, weight.dtype, divisor, needed)
                ctx.divisors[1] = 1 if is_divided else divisor
            else:
                gradients = Gradients.zeros(hidden, weight, bias, needed) if any(needed) else None
                kind = torch.float64 if loss.takes_wide_scale else head.accumulate
                scale = torch.full((tokens.count, 1), 1 / inside, dtype=kind, device=hidden.device)
                losses = run_chunks(head, tokens, loss, targets, rows, scale, gradients)
        if gradients is not None:
            ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        return (losses.sum() / divisor).to(head.accumulate)

    @staticmethod
    @differentiable_once()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept = graph_is_kept()
        made = [
            None if gradient is None else scaled(gradient, gradients[0] / divisor, dtype, kept)
            for gradient, divisor, dtype in zip(ctx.saved_tensors, ctx.divisors, ctx.dtypes, strict=True)
        ]
        return (*made, *[None] * ctx.others)


class TokenLosses(torch.autograd.Function):
    """The loss of each token, zero if ignored. The chunks run again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        loss: TokenLoss,
        rows: int,
        dtype: torch.dtype,
        *targets: Tensor | None,
    ) -> Tensor:
        ctx.name, ctx.others = loss.name, 4 + len(targets)
        ctx.save_for_backward(hidden, weight, bias, *targets)
        ctx.tokens, ctx.loss, ctx.rows, ctx.dtype = tokens, loss, rows, dtype
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, dtype)
            losses = run_chunks(head, tokens, loss, targets, rows)
        return tokens.spread(losses.to(head.accumulate))

    @staticmethod
    @differentiable_once()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head.of(hidden, weight, bias, ctx.dtype)
            made = Gradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3])
            scale = ctx.tokens.gather(gradients[0]).unsqueeze(1).to(accumulation_dtype(ctx.dtype))
            run_chunks(head, ctx.tokens, ctx.loss, targets, ctx.rows, scale, made)
        sums = [made.hidden, made.weight, made.bias]
        return (*cast(sums, dtypes(hidden, weight, bias)), *[None] * ctx.others)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype, kept: bool) -> Tensor:
    """The gradient times a number, in a dtype. The gradient is overwritten unless it is `kept`."""
    if dtype != gradient.dtype and on_cuda(gradient):
        # One pass that rounds as it writes. A CPU would make a copy in fp32 first.
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
    # In place: a second copy of the weight's gradient would raise the peak of the step.
    return (torch.mul if kept else torch.Tensor.mul_)(gradient, scale).to(dtype)


def dtypes(*tensors: Tensor | None) -> list[torch.dtype | None]:
    return [None if tensor is None else tensor.dtype for tensor in tensors]


def cast(tensors: Sequence[Tensor | None], to: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor, dtype in zip(tensors, to, strict=True)]
