"""A causal language model that reads a text piece by piece, keeping keys and values of what it has read."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.decoder import Decoder
from tightfit.models.kv_cache import KVCache

Read = Callable[[Tensor], Tensor]


def reader(model: nn.Module, capacity: int) -> Read | None:
    """What reads the next piece of a text of up to `capacity` tokens: ids (B, t) to logits (B, t, V).

    For a `Decoder` and for the causal models of `transformers` that keep `past_key_values`; None for others. Reads from
    the start; the cache lives as long as the reader. To be called without gradients.
    """
    if isinstance(model, Decoder):
        cache = KVCache(model.config, capacity)
        return lambda ids: model(ids, cache=cache).logits
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    return PastReader(model) if takes_cache and not encodes else None


class PastReader:
    """Reads with a model of `transformers`, which makes the kind of cache that it needs itself."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.past: Any = None

    def __call__(self, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, past_key_values=self.past, use_cache=True)
        self.past = output.past_key_values
        if self.past is None:
            raise ModelError(f"{type(self.model).__name__} gave no cache of keys and values back: read the text whole")
        return output.logits


def pieces(ids: Tensor, size: int) -> Iterator[Tensor]:
    """`ids` (B, T) in pieces of `size` tokens, the last one shorter."""
    yield from ids.split(size, dim=1)
