"""The tokens of a teacher's distribution that a store for distillation keeps.

There are two ways to choose them: the k most probable ones with the rest as one event, whose gradient is biased, and a
random sample whose gradient is right on average.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.errors import InputError
from tightfit.ops._chunked_head import accumulation_dtype
from tightfit.ops._soft_targets import Mix, check_mix, parts
from tightfit.ops.head_loss import widened

__all__ = ["TokenWeights", "sampled_tokens", "top_k_tokens"]


class TokenWeights(NamedTuple):
    """The stored part of a teacher's distribution: token ids int32 and their weights, both (N, k).

    `tail` (N,) is the probability of all other tokens together, or None for a random sample. Weights and tail are fp32
    (fp64 for fp64 logits).
    """

    ids: Tensor
    weights: Tensor
    tail: Tensor | None


def sampled_tokens(
    logits: Tensor, k: int, generator: torch.Generator | None = None, *, temperature: float = 1.0
) -> TokenWeights:
    """Draw k different tokens of each row, with weights whose expectation is softmax(logits / T).

    The expectation of a token's weight, which is 0 where it is not in the sample, is exactly its probability. So the
    gradient of `stored_distillation_loss`, which is linear in the weights, is that of forward KL on average (Sparse
    Logit Sampling, Anshumann et al., arXiv 2503.16870). That paper draws tokens with replacement, and weights them by
    their counts. Here the sample is a priority sample (Duffield, Lund, Thorup 2007, "Priority sampling for estimation
    of arbitrary subset sums"): with a uniform u in (0, 1) for each token, those with the k largest p / u, weighted
    max(p, t), where t is the next largest p / u. No token is stored twice, probable tokens have their exact
    probability, and k = V stores the whole distribution.

    Args:
        logits: (N, V), any floating dtype.
        k: The number of tokens, from 1 to V.
        generator: The random generator, on the logits' device. The result depends on its state and on N and V.
        temperature: T, above 0.

    Returns:
        Token ids (N, k) int32, their weights (N, k), and no tail.

    Raises:
        InputError: k or the temperature is out of range.

    Example:
        >>> import torch
        >>> from tightfit.ops import sampled_tokens
        >>> ids, weights, _ = sampled_tokens(torch.randn(4, 100), 8, torch.Generator().manual_seed(0))
        >>> ids.shape, weights.shape
        (torch.Size([4, 8]), torch.Size([4, 8]))
    """
    check_choice("sampled_tokens", logits, k, temperature)
    return joined([sampled(part, k, generator) for part in softened(logits, temperature)], logits, k)


def top_k_tokens(logits: Tensor, k: int, *, temperature: float = 1.0) -> TokenWeights:
    """Find the k most probable tokens of each row, with their probabilities and that of all others.

    The gradient from them is biased: see `stored_distillation_loss`.

    Args:
        logits: (N, V), any floating dtype.
        k: The number of tokens, from 1 to V.
        temperature: T in softmax(logits / T), above 0.

    Returns:
        Token ids (N, k) int32, most probable first, their probabilities (N, k), and the probability of the others (N,).

    Raises:
        InputError: k or the temperature is out of range.

    Example:
        >>> import torch
        >>> from tightfit.ops import top_k_tokens
        >>> ids, weights, tail = top_k_tokens(torch.tensor([[0.0, 0.0, 1.0]]).log(), 1)
        >>> ids.tolist(), weights.tolist(), tail.tolist()
        ([[2]], [[1.0]], [0.0])
    """
    check_choice("top_k_tokens", logits, k, temperature)
    return joined([most_probable(part, k) for part in softened(logits, temperature)], logits, k)


def sampled(log_p: Tensor, k: int, generator: torch.Generator | None) -> TokenWeights:
    # log(p / u) = log p + e for an exponential e. fp64: uniform numbers in fp32 have 24 bits, too few for the chance
    # with which a token of probability 1e-9 is drawn.
    noise = torch.empty(log_p.shape, dtype=torch.float64, device=log_p.device).exponential_(generator=generator)
    priorities = noise.add_(log_p)
    highest = priorities.topk(min(k + 1, log_p.shape[1]), dim=1)
    ids = highest.indices[:, :k]
    weights = log_p.gather(1, ids).exp()
    if k < log_p.shape[1]:
        weights = torch.maximum(weights, highest.values[:, k:].exp().to(weights.dtype))
    return TokenWeights(ids.int(), weights, None)


def most_probable(log_p: Tensor, k: int) -> TokenWeights:
    highest = log_p.topk(k, dim=1)
    others = log_p.exp().scatter_(1, highest.indices, 0)  # 1 - the sum of the k would lose the digits of a small rest
    return TokenWeights(highest.indices.int(), highest.values.exp(), others.sum(dim=1))


def softened(logits: Tensor, temperature: float) -> Iterator[Tensor]:
    """log softmax(logits / T), for a part of the rows at a time: the caller's logits may fill the memory."""
    for part in parts(len(logits)):
        yield (widened(logits[part]) / temperature).log_softmax(dim=1)


def joined(found: Sequence[TokenWeights], logits: Tensor, k: int) -> TokenWeights:
    """The parts' tokens in one."""
    if not found:
        weights = logits.new_empty((0, k), dtype=accumulation_dtype(logits.dtype))
        return TokenWeights(weights.int(), weights, weights.sum(dim=1))
    ids, weights, tails = zip(*found, strict=True)
    return TokenWeights(torch.cat(ids), torch.cat(weights), None if tails[0] is None else torch.cat(tails))


def check_choice(name: str, logits: Tensor, k: int, temperature: float) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InputError(f"{name}: logits {tuple(logits.shape)} of {logits.dtype}: give floating-point logits (N, V)")
    if not 1 <= k <= logits.shape[1]:
        raise InputError(f"{name}: k={k} is not between 1 and the vocabulary's {logits.shape[1]} tokens")
    check_mix(name, Mix(temperature, 0.0))
