"""A linear head and the distillation loss against a few stored tokens of a teacher's distribution, in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._chunked_head import Chunk, ChunkLoss, Head, Tokens
from tightfit.ops._soft_targets import Diverged, Exponentials, Mix, check_mix
from tightfit.ops.head_loss import (
    Reduction,
    check_head,
    check_labels,
    check_options,
    chunked_loss,
    default_chunk_size,
    reduced,
    widened,
)

__all__ = ["plain_stored_distillation_loss", "stored_distillation_loss"]


def stored_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    token_weights: Tensor,
    labels: Tensor,
    *,
    tail_weight: Tensor | None = None,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Forward KL of a student's next-token distribution from k stored tokens of a teacher's, in chunks.

    With q the softmax of the student's logits over the temperature T, the loss of a token is (1 - hard_weight) T² S +
    hard_weight CE, where CE is the cross-entropy of the label at temperature 1, and S is:

    - Without `tail_weight`, for the ids and weights w of `sampled_tokens`: the cross-entropy - sum w log q over the k
      tokens. On average over samples it is KL(p, q) plus the entropy of p, which the student does not change, and its
      gradient is that of KL(p, q) (Sparse Logit Sampling, arXiv 2503.16870). A token may occur twice.
    - With `tail_weight` r, for the result of `top_k_tokens`: sum w (log w - log q) + r (log r - log Q), where Q is the
      student's probability of all tokens but the k. It is KL(p, q) of distributions that know the k tokens and "any
      other token" only, at most the true one. The student gets no word on the tokens of the tail: they keep their
      shares of Q. Its gradient is biased. Ids of a row differ from each other.

    The logits of all tokens never exist, and ignored tokens are dropped first, whatever is stored for them. Cannot be
    differentiated twice.

    Args:
        hidden: (N, D), as in `distillation_loss`, like `weight` (V, D), `labels` (N,), `bias` (V,), `hard_weight` and
            `ignore_index`.
        token_ids: (N, k), int32 or int64 in [0, V).
        token_weights: (N, k), any floating dtype.
        tail_weight: (N,), any floating dtype, or None.
        temperature: T, that of the stored weights too.
        reduction: `"mean"` over the tokens that are not ignored, `"sum"`, or `"none"`.
        chunk_size: As in `linear_cross_entropy`.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (N,) for "none", with zeros for ignored tokens.

    Raises:
        InputError: Shapes, dtypes, labels, ids or options do not fit.

    Example:
        >>> import torch
        >>> from tightfit.ops import stored_distillation_loss, top_k_tokens
        >>> hidden, weight, labels = torch.randn(64, 16), torch.randn(100, 16), torch.randint(100, (64,))
        >>> teacher = torch.randn(64, 100)
        >>> ids, weights, tail = top_k_tokens(teacher, 100)  # all tokens: the loss is forward KL
        >>> loss = stored_distillation_loss(hidden, weight, ids, weights, labels, tail_weight=tail)
        >>> student, teacher = (hidden @ weight.T).log_softmax(1), teacher.log_softmax(1)
        >>> expected = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
        >>> torch.allclose(loss, expected)
        True
    """
    loss = StoredLoss(Mix(temperature, hard_weight))
    check_head(loss.name, hidden, weight, bias, labels)
    check_options(loss.name, reduction, chunk_size)
    check_mix(loss.name, loss.mix)
    check_stored(token_ids, token_weights, tail_weight, len(labels))
    tokens = Tokens(labels, ignore_index)
    check_labels(loss.name, tokens, len(weight))
    check_ids(tokens.gather(token_ids), len(weight))
    rows = chunk_size or default_chunk_size(tokens.count, weight.shape[1], len(weight))
    stored = [None if t is None else t.detach() for t in (token_ids, token_weights, tail_weight)]
    return chunked_loss(loss, hidden, weight, bias, tokens, reduction, rows, stored)


def plain_stored_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    token_weights: Tensor,
    labels: Tensor,
    *,
    tail_weight: Tensor | None = None,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The reference: the same loss from the student's logits of all tokens, in at least fp32."""
    logits, ids = widened(F.linear(hidden, weight, bias)), token_ids.long()
    log_q = (logits / temperature).log_softmax(dim=1)
    soft = -(token_weights * log_q.gather(1, ids)).sum(dim=1)
    if tail_weight is not None:
        others = log_q.exp().scatter(1, ids, 0).sum(dim=1).clamp(min=torch.finfo(log_q.dtype).tiny)
        entropy = torch.xlogy(token_weights, token_weights).sum(dim=1) + torch.xlogy(tail_weight, tail_weight)
        soft = soft + entropy - tail_weight * others.log()
    hard = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none") if hard_weight else 0
    losses = (1 - hard_weight) * temperature**2 * soft + hard_weight * hard
    return reduced(torch.where(labels != ignore_index, losses, 0), labels != ignore_index, reduction)


@dataclass(frozen=True)
class StoredLoss:
    """The loss of a token against stored ones. Its targets are their ids and weights, and the weight of the others."""

    mix: Mix
    name: ClassVar[str] = "stored_distillation_loss"
    takes_wide_scale: ClassVar[bool] = True

    def of_chunks(self, head: Head, tokens: Tokens, rows: int, targets: Sequence[Tensor | None]) -> ChunkLoss:
        stored_ids, stored_weights, stored_tail = targets
        assert stored_ids is not None, "ids are stored"
        assert stored_weights is not None, "weights are stored"

        def of_chunk(chunk: Chunk, scale: Tensor | None) -> Tensor:
            span = chunk.start, chunk.stop
            ids = tokens.gather(stored_ids, *span).long()
            weights = tokens.gather(stored_weights, *span).to(head.accumulate)
            tail = None if stored_tail is None else tokens.gather(stored_tail, *span).to(head.accumulate).unsqueeze(1)
            labels = tokens.labels[chunk.start : chunk.stop]

            def divergence(student: Tensor, part: slice) -> Diverged:
                if tail is None:
                    return some_tokens(student, ids[part], weights[part])
                return some_and_others(student, ids[part], weights[part], tail[part])

            return self.mix.losses_(chunk.logits, labels, scale, divergence)

        return of_chunk


def some_tokens(logits: Tensor, ids: Tensor, weights: Tensor) -> Diverged:
    """- sum w log q; d / d z = q sum(w) - w."""
    q = Exponentials.of_(logits)
    total = weights.sum(dim=1, keepdim=True)
    losses = total.double() * q.log_total - (logits.gather(1, ids).mul_(weights)).sum(dim=1, keepdim=True)
    torch.mul(q.values, (total / q.total).to(logits.dtype), out=logits)
    logits.scatter_add_(1, ids, -weights)  # adds where a token occurs twice
    return Diverged(losses.squeeze(1))


def some_and_others(logits: Tensor, ids: Tensor, weights: Tensor, tail: Tensor) -> Diverged:
    """sum w (log w - log q) + r (log r - log Q), where Q is the sum of q over the other tokens.

    d / d z = q s - w for the k tokens, and q (s - r / Q) for the others, where s = sum(w) + r.
    """
    q = Exponentials.of_(logits)
    total = weights.sum(dim=1, keepdim=True) + tail
    log_of_ids = logits.gather(1, ids).sub_(q.log_total.to(logits.dtype))
    others = torch.mul(q.values, (1 / q.total).to(logits.dtype), out=logits).scatter_(1, ids, 0)
    # Q is summed. 1 - the sum over the k would lose its digits where they have almost all of the probability.
    rest = others.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).tiny)
    others.mul_(total - tail / rest).scatter_(1, ids, log_of_ids.exp().mul_(total).sub_(weights))
    of_ids = torch.xlogy(weights, weights).sub_(log_of_ids.mul_(weights)).sum(dim=1)
    return Diverged(of_ids + (torch.xlogy(tail, tail) - tail * rest.log()).squeeze(1))


def check_stored(ids: Tensor, weights: Tensor, tail: Tensor | None, tokens: int) -> None:
    name, shapes = StoredLoss.name, f"token_ids {tuple(ids.shape)}, token_weights {tuple(weights.shape)}"
    if ids.dim() != 2 or ids.shape != weights.shape or len(ids) != tokens:
        raise InputError(f"{name}: {shapes}, labels ({tokens},): give ids and weights (N, k) and labels (N,)")
    if ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name}: token_ids are {ids.dtype}: give int32 or int64")
    if not weights.is_floating_point():
        raise InputError(f"{name}: token_weights are {weights.dtype}: give a floating-point tensor")
    if tail is not None and (tail.shape != ids.shape[:1] or not tail.is_floating_point()):
        raise InputError(f"{name}: tail_weight {tuple(tail.shape)} of {tail.dtype}: give a floating-point tensor (N,)")


def check_ids(ids: Tensor, vocabulary: int) -> None:
    if not ids.numel():
        return
    least, highest = int(ids.min()), int(ids.max())
    if least < 0 or highest >= vocabulary:
        raise InputError(
            f"{StoredLoss.name}: token id {least if least < 0 else highest} is outside the student's vocabulary of "
            f"{vocabulary}: use a store of a teacher with the student's tokenizer"
        )
