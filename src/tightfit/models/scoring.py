"""How likely a model finds a text, a text longer than fits in one pass too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.models.loading import position_limit
from tightfit.models.mode import evaluating
from tightfit.models.reading import pieces, reader

CHUNK_SIZE = 512  # tokens in a piece, where nobody says


@dataclass(frozen=True)
class TextScore:
    """`log_likelihoods` (B, T - 1) fp32 on the CPU: log p(token | all before it), in nats, from the second token on."""

    log_likelihoods: Tensor

    @property
    def tokens(self) -> int:
        """Tokens that were scored."""
        return self.log_likelihoods.numel()

    @property
    def log_likelihood(self) -> float:
        """The sum over all tokens, in nats."""
        return self.log_likelihoods.double().sum().item()

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(-self.log_likelihood / self.tokens)


@torch.no_grad()
def score(model: nn.Module, input_ids: Tensor, *, chunk_size: int | None = CHUNK_SIZE) -> TextScore:
    """Compute the log-likelihood of each token of a text given those before it.

    The text goes through in pieces with a cache of keys and values, so that activations and logits of one piece exist
    at a time. The model stays on its device and in its mode.

    Args:
        model: A `Decoder` or a causal model of `transformers`.
        input_ids: (T,) or (B, T) int64, at least two tokens.
        chunk_size: The tokens of a piece. None takes the text in one pass. Both are equal within rounding.

    Returns:
        The log-likelihoods (B, T - 1) in nats, from the second token on, with their sum and the perplexity.

    Raises:
        InputError: Ids or sizes do not fit.
        ModelError: The text is longer than the model's positions, or the model keeps no cache.

    Example:
        >>> import tightfit, torch
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
        >>> found = tightfit.score(model, torch.arange(10))
        >>> tuple(found.log_likelihoods.shape), bool((found.log_likelihoods < 0).all())
        ((1, 9), True)
    """
    input_ids = input_ids[None] if input_ids.ndim == 1 else input_ids
    _check(model, input_ids, chunk_size)
    device = next(model.parameters()).device
    targets = input_ids[:, 1:].to(device)
    with evaluating(model):
        scored, first = [], 0
        for logits in _logits(model, input_ids[:, :-1].to(device), chunk_size):
            length = logits.shape[1]
            scored.append(_log_likelihoods(logits, targets[:, first : first + length]))
            first += length
            del logits
    return TextScore(torch.cat(scored, dim=1).cpu())


def _logits(model: nn.Module, ids: Tensor, chunk_size: int | None) -> Iterator[Tensor]:
    """Logits (B, t, V) of one piece after the other."""
    if chunk_size is None:
        yield model(input_ids=ids).logits
        return
    read = reader(model, capacity=ids.shape[1])
    if read is None:
        raise ModelError(
            f"{type(model).__name__} keeps no cache of keys and values: score the text in one pass, chunk_size=None"
        )
    for piece in pieces(ids, chunk_size):
        yield read(piece)


def _log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, t), in fp32, from logits (B, t, V)."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.neg_().view(targets.shape)


def _check(model: nn.Module, input_ids: Tensor, chunk_size: int | None) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise InputError(
            f"score: input_ids have the shape {tuple(input_ids.shape)}: give (tokens,) or (batch, tokens), at least "
            "two tokens"
        )
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"score: chunk_size is {chunk_size}: give at least 1, or None for one pass")
    limit = position_limit(model)
    if limit is not None and input_ids.shape[1] - 1 > limit:
        raise ModelError(
            f"score: the text has {input_ids.shape[1]} tokens, the model's positions reach {limit}: shorten the text, "
            "or take a model with more max_position_embeddings"
        )
