"""Two linear heads and the distillation loss together, with the logits of a few tokens at a time.

The student's gradients are made in forward, as `linear_cross_entropy` makes them. The teacher has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._chunked_head import Chunk, ChunkLoss, Head, Tokens
from tightfit.ops._soft_targets import Mix, check_mix, divergence_of, mean_square
from tightfit.ops.head_loss import (
    Reduction,
    check_dtypes,
    check_head,
    check_labels,
    check_options,
    chunked_loss,
    default_chunk_size,
    product_dtype,
    reduced,
    widened,
)

__all__ = ["distillation_loss", "hidden_state_loss", "plain_distillation_loss", "plain_hidden_state_loss"]

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "logits_mse"]


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    divergence: DivergenceName = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Divergence of a student's next-token distribution from a teacher's, without the logits of all tokens of either.

    With q and p the softmax of the student's and the teacher's logits over the temperature T, the loss of a token is (1
    - hard_weight) T² D + hard_weight CE, where CE is the cross-entropy of the label at temperature 1 (Hinton et al.
    2015, "Distilling the knowledge in a neural network"), and D by `divergence`:

    - "forward_kl": KL(p, q) = sum p (log p - log q), "reverse_kl": KL(q, p).
    - "jsd": generalised Jensen-Shannon divergence beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q
      (Agarwal et al., "On-policy distillation of language models", arXiv 2306.13649, eq. 1). Beside 0 and 1 it is that
      formula. At beta 0 it is forward KL and at 1 reverse KL, as in TRL: the limits of JSD / beta and of JSD / (1 -
      beta). TRL does not multiply by T².
    - "logits_mse": the mean over the vocabulary of the squared difference of the logits, whatever the temperature (Ba
      and Caruana 2014, "Do deep nets really need to be deep?"). Logits are not centred.

    Sums over tokens, those of gradients too, are computed in fp32. If every label is ignored, the loss is zero with
    zero gradients, for "mean" too. For micro-batches, use "sum" and divide by the valid tokens of the whole batch.
    Cannot be differentiated twice.

    Args:
        hidden: (N, D), the student's, of one floating dtype with weight and bias. Under autocast the dtypes may differ,
            and products are in the autocast dtype.
        weight: (V, D), the student's head.
        teacher_hidden: (N, E), the teacher's, whose width and dtype may be others. No gradient reaches it.
        teacher_weight: (V, E), the teacher's head.
        labels: (N,), integers in [0, V), or `ignore_index`. Ignored tokens are dropped before any product.
        divergence: D, as above.
        beta: Of "jsd".
        temperature: T.
        hard_weight: The share of the labels' cross-entropy, from 0 to 1.
        ignore_index: The label of tokens that do not count.
        bias: (V,), the student's.
        teacher_bias: (V,), the teacher's.
        reduction: `"mean"` over the tokens that are not ignored, `"sum"`, or `"none"`.
        chunk_size: The number of tokens whose logits exist at a time. None: that of `linear_cross_entropy` for a
            vocabulary of twice the size.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (N,) for "none", with zeros for ignored tokens.

    Raises:
        InputError: Shapes, dtypes, labels or options do not fit, or the vocabularies have different sizes.

    Example:
        >>> import torch
        >>> from tightfit.ops import distillation_loss
        >>> hidden, weight, labels = torch.randn(64, 16), torch.randn(100, 16), torch.randint(100, (64,))
        >>> teacher_hidden, teacher_weight = torch.randn(64, 32), torch.randn(100, 32)
        >>> loss = distillation_loss(hidden, weight, teacher_hidden, teacher_weight, labels, chunk_size=16)
        >>> student, teacher = (hidden @ weight.T).log_softmax(1), (teacher_hidden @ teacher_weight.T).log_softmax(1)
        >>> expected = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
        >>> torch.allclose(loss, expected)
        True
    """
    # The dtype of products is chosen here: inside the operator, autocast is off.
    loss = TeacherLoss(Mix(temperature, hard_weight), divergence, beta, product_dtype(teacher_hidden))
    check_head(loss.name, hidden, weight, bias, labels)
    check_options(loss.name, reduction, chunk_size)
    check_mix(loss.name, loss.mix)
    check_divergence(divergence, beta)
    check_teacher(weight, teacher_hidden, teacher_weight, teacher_bias, len(labels))
    tokens = Tokens(labels, ignore_index)
    check_labels(loss.name, tokens, len(weight))
    rows = chunk_size or default_chunk_size(tokens.count, weight.shape[1], 2 * len(weight))
    teacher = [None if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias)]
    return chunked_loss(loss, hidden, weight, bias, tokens, reduction, rows, teacher)


def plain_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    divergence: DivergenceName = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The reference: the same loss from both models' logits of all tokens, in at least fp32."""
    logits = widened(F.linear(hidden, weight, bias))
    with torch.no_grad():
        teacher_logits = widened(F.linear(teacher_hidden, teacher_weight, teacher_bias))
    soft = plain_divergence(logits / temperature, teacher_logits / temperature, divergence, beta) * temperature**2
    hard = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none") if hard_weight else 0
    losses = torch.where(labels != ignore_index, (1 - hard_weight) * soft + hard_weight * hard, 0)
    return reduced(losses, labels != ignore_index, reduction)


def plain_divergence(student: Tensor, teacher: Tensor, divergence: str, beta: float) -> Tensor:
    """The divergence of each token, from logits over the temperature."""
    if divergence == "logits_mse":
        return (student - teacher).square().mean(dim=1)
    log_q, log_p = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    if divergence == "forward_kl" or (divergence == "jsd" and beta == 0):
        return kl(log_p, log_q)
    if divergence == "reverse_kl" or beta == 1:
        return kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + log(beta), log_q + log(1 - beta))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of each row."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)


def hidden_state_loss(
    hidden: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    *,
    projection: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Mean squared difference of a student's hidden states, projected, from a teacher's.

    The loss of a token is the mean over E of (hidden @ projection.T + bias - teacher_hidden)² (Romero et al. 2015,
    "FitNets"; Jiao et al. 2020, "TinyBERT", eq. 8). Cannot be differentiated twice.

    Args:
        hidden: (N, D), the student's, of one floating dtype with projection and bias, or any under autocast.
        teacher_hidden: (N, E), of any floating dtype. No gradient reaches it.
        labels: (N,), integers. Tokens with `ignore_index` do not count, and are dropped before any product.
        projection: (E, D). Without it D is E.
        bias: (E,).
        ignore_index: The label of tokens that do not count.
        reduction: `"mean"` over the tokens that are not ignored, `"sum"`, or `"none"`.
        chunk_size: The number of tokens whose projected states exist at a time.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (N,) for "none", with zeros for ignored tokens.

    Raises:
        InputError: Shapes, dtypes, labels or options do not fit.

    Example:
        >>> import torch
        >>> from tightfit.ops import hidden_state_loss
        >>> hidden, teacher_hidden, projection = torch.randn(8, 4), torch.randn(8, 6), torch.randn(6, 4)
        >>> loss = hidden_state_loss(hidden, teacher_hidden, torch.zeros(8, dtype=torch.int64), projection=projection)
        >>> torch.allclose(loss, torch.nn.functional.mse_loss(hidden @ projection.T, teacher_hidden))
        True
    """
    name = HiddenLoss.name
    check_options(name, reduction, chunk_size)
    check_hidden_states(hidden, teacher_hidden, labels, projection, bias)
    tokens = Tokens(labels, ignore_index)
    if projection is None:
        # Without a product there is nothing to gain: the loss needs as much as the hidden states, in plain operators.
        return unprojected(hidden, teacher_hidden.detach(), tokens, reduction)
    rows = chunk_size or default_chunk_size(tokens.count, *reversed(projection.shape))
    targets = [teacher_hidden.detach()]
    return chunked_loss(HiddenLoss(), hidden, projection, bias, tokens, reduction, rows, targets)


def plain_hidden_state_loss(
    hidden: Tensor,
    teacher_hidden: Tensor,
    labels: Tensor,
    *,
    projection: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """The reference: the same loss from the projected hidden states of all tokens."""
    projected = hidden if projection is None else F.linear(hidden, projection, bias)
    squares = (widened(projected) - widened(teacher_hidden.detach())).square().mean(dim=1)
    return reduced(torch.where(labels != ignore_index, squares, 0), labels != ignore_index, reduction)


def unprojected(hidden: Tensor, teacher_hidden: Tensor, tokens: Tokens, reduction: Reduction) -> Tensor:
    gap = widened(tokens.gather(hidden)) - widened(tokens.gather(teacher_hidden))
    losses = gap.square().mean(dim=1)
    if reduction == "none":
        return tokens.spread(losses)
    return losses.sum() / max(tokens.count, 1) if reduction == "mean" else losses.sum()


@dataclass(frozen=True)
class TeacherLoss:
    """The distillation loss of a token. Its targets are the teacher's hidden states, weight and bias."""

    mix: Mix
    divergence: DivergenceName
    beta: float
    dtype: torch.dtype  # of the teacher's products
    name: ClassVar[str] = "distillation_loss"
    takes_wide_scale: ClassVar[bool] = True

    def of_chunks(self, head: Head, tokens: Tokens, rows: int, targets: Sequence[Tensor | None]) -> ChunkLoss:
        hidden, weight, bias = targets
        assert hidden is not None, "the teacher has hidden states"
        assert weight is not None, "the teacher has a weight"
        teacher = Head.of(hidden, weight, bias, self.dtype)
        buffer = torch.empty((rows, len(weight)), dtype=head.accumulate, device=hidden.device)
        own = None
        if self.dtype not in (head.accumulate, head.weight.dtype):
            own = torch.empty_like(buffer, dtype=self.dtype)
        divergence = divergence_of(self.divergence, self.beta)

        def of_chunk(chunk: Chunk, scale: Tensor | None) -> Tensor:
            states = tokens.gather(hidden, chunk.start, chunk.stop).to(self.dtype)
            # The student's narrow buffer is free until its gradient is rounded.
            narrow = None if self.dtype == head.accumulate else chunk.narrow if own is None else own
            logits = teacher.logits(states, buffer, narrow)
            labels = tokens.labels[chunk.start : chunk.stop]
            return self.mix.losses_(
                chunk.logits, labels, scale, lambda student, part: divergence(student, self.mix.softened_(logits[part]))
            )

        return of_chunk


@dataclass(frozen=True)
class HiddenLoss:
    """The mean square of a token's difference from the teacher's hidden state, which is its target."""

    name: ClassVar[str] = "hidden_state_loss"
    takes_wide_scale: ClassVar[bool] = True

    def of_chunks(self, head: Head, tokens: Tokens, rows: int, targets: Sequence[Tensor | None]) -> ChunkLoss:
        (teacher,) = targets
        assert teacher is not None, "the teacher has hidden states"

        def of_chunk(chunk: Chunk, scale: Tensor | None) -> Tensor:
            states = tokens.gather(teacher, chunk.start, chunk.stop).to(chunk.logits.dtype, copy=True)
            found = mean_square(chunk.logits, states)
            if scale is not None:
                chunk.logits.mul_((scale.double() * found.factor).to(chunk.logits.dtype))
            return found.losses

        return of_chunk


def check_divergence(divergence: str, beta: float) -> None:
    known = get_args(DivergenceName)
    if divergence not in known:
        raise InputError(f"distillation_loss: divergence={divergence!r} is unknown: use {', '.join(map(repr, known))}")
    if not 0 <= beta <= 1:
        raise InputError(f"distillation_loss: beta={beta} is not between 0 and 1")


def check_teacher(weight: Tensor, hidden: Tensor, teacher_weight: Tensor, bias: Tensor | None, tokens: int) -> None:
    name = TeacherLoss.name
    shapes = f"teacher_hidden {tuple(hidden.shape)}, teacher_weight {tuple(teacher_weight.shape)}"
    if hidden.dim() != 2 or teacher_weight.dim() != 2 or hidden.shape[1] != teacher_weight.shape[1]:
        raise InputError(f"{name}: {shapes} do not fit: give teacher_hidden (N, E) and teacher_weight (V, E)")
    if len(hidden) != tokens:
        raise InputError(f"{name}: {shapes}: the student has {tokens} tokens: give both models the same tokens")
    if len(teacher_weight) != len(weight):
        raise InputError(
            f"{name}: the student's vocabulary has {len(weight)} tokens, the teacher's {len(teacher_weight)}: "
            "tokens are compared one by one, so use models of one tokenizer, and cut off rows that only pad a head"
        )
    if bias is not None and bias.shape != teacher_weight.shape[:1]:
        raise InputError(f"{name}: teacher_bias {tuple(bias.shape)}, {shapes}: teacher_bias is (V,)")
    check_dtypes(name, teacher_hidden=hidden, teacher_weight=teacher_weight, teacher_bias=bias)


def check_hidden_states(
    hidden: Tensor, teacher_hidden: Tensor, labels: Tensor, projection: Tensor | None, bias: Tensor | None
) -> None:
    name = HiddenLoss.name
    shapes = f"hidden {tuple(hidden.shape)}, teacher_hidden {tuple(teacher_hidden.shape)}"
    if projection is not None:
        shapes += f", projection {tuple(projection.shape)}"
    if hidden.dim() != 2 or teacher_hidden.dim() != 2 or labels.dim() != 1:
        raise InputError(f"{name}: {shapes}, labels {tuple(labels.shape)}: give (N, D), (N, E) and labels (N,)")
    if not len(hidden) == len(teacher_hidden) == len(labels):
        raise InputError(f"{name}: {shapes}, labels {tuple(labels.shape)}: all have the same tokens (N)")
    if projection is None and bias is not None:
        raise InputError(f"{name}: bias {tuple(bias.shape)} belongs to a projection: give both")
    if projection is None and hidden.shape != teacher_hidden.shape:
        raise InputError(f"{name}: {shapes}: widths differ: give a projection (E, D)")
    if projection is not None and projection.shape != (teacher_hidden.shape[1], hidden.shape[1]):
        raise InputError(f"{name}: {shapes}: the projection is (E, D)")
    if bias is not None and bias.shape != teacher_hidden.shape[1:]:
        raise InputError(f"{name}: bias {tuple(bias.shape)}, {shapes}: bias is (E,)")
    check_dtypes(name, hidden=hidden, projection=projection, bias=bias)
    check_dtypes(name, teacher_hidden=teacher_hidden)
