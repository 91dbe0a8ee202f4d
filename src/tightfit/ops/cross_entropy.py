"""Linear layer and cross-entropy together, with the logits of a few tokens at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._chunked_head import Tokens, writes_wider
from tightfit.ops._label_loss import LabelLoss
from tightfit.ops.head_loss import (
    Reduction,
    check_head,
    check_labels,
    check_options,
    chunked_loss,
    default_chunk_size,
    product_dtype,
)

__all__ = ["linear_cross_entropy", "plain_linear_cross_entropy"]


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

    With logits l and label y, the loss of a token is lse(l) - l_y. Sums over tokens, those of gradients too, are
    computed in fp32. If every label is ignored, the loss is zero with zero gradients, for "mean" too, and not NaN.
    Cannot be differentiated twice.

    Args:
        hidden: (N, D), of one floating dtype with weight and bias. Under autocast the dtypes may differ, and products
            are in the autocast dtype.
        weight: (V, D).
        labels: (N,), integers in [0, V), or `ignore_index`. Ignored tokens are dropped before any product.
        bias: (V,).
        ignore_index: The label of tokens that do not count.
        reduction: `"mean"` over the tokens that are not ignored, `"sum"`, or `"none"`.
        label_smoothing: e mixes in the uniform distribution: (1 - e) (lse(l) - l_y) + e (lse(l) - mean(l)) (Szegedy et
            al. 2016).
        z_loss: Adds z_loss * lse(l)² (PaLM, Chowdhery et al. 2022).
        chunk_size: The number of tokens whose logits exist at a time; for None see `default_chunk_size`.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs): a scalar, or (N,) for "none", with zeros for ignored tokens.

    Raises:
        InputError: Shapes, dtypes, labels or options do not fit.

    Example:
        >>> import torch
        >>> from tightfit.ops import linear_cross_entropy
        >>> hidden, weight, labels = torch.randn(64, 16), torch.randn(100, 16), torch.randint(100, (64,))
        >>> loss = linear_cross_entropy(hidden, weight, labels, chunk_size=16)  # logits of 16 tokens at a time
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden @ weight.T, labels))
        True
    """
    loss = LabelLoss(label_smoothing, z_loss)
    check_head(loss.name, hidden, weight, bias, labels)
    check_options(loss.name, reduction, chunk_size)
    if not 0 <= label_smoothing <= 1:
        raise InputError(f"linear_cross_entropy: label_smoothing={label_smoothing} is not between 0 and 1")
    tokens = Tokens(labels, ignore_index)
    check_labels(loss.name, tokens, len(weight))
    dtype = product_dtype(hidden)
    on_a_card = dtype.itemsize == 2 and writes_wider(hidden, dtype)
    rows = chunk_size or default_chunk_size(tokens.count, weight.shape[1], len(weight), on_a_card=on_a_card)
    return chunked_loss(loss, hidden, weight, bias, tokens, reduction, rows)


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
