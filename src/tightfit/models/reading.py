"""A causal language model that reads a text piece by piece, keeping keys and values of what it has read."""

import inspect
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from tightfit.errors import ModelError
from tightfit.models.decoder import Decoder
from tightfit.models.kv_cache import KVCache


class Reader(Protocol):
    """Reads the next piece of a text: ids (B, t) to logits (B, t, V)."""

    def __call__(self, ids: Tensor) -> Tensor: ...

    def cached(self) -> Iterator[Tensor]:
        """The tensors of the cache."""
        ...


def reader(model: nn.Module, capacity: int) -> Reader | None:
    """A function that reads the next piece of a text of up to `capacity` tokens: ids (B, t) to logits (B, t, V).

    For a `Decoder` and for the causal models of `transformers` that keep keys and values of every token; None for
    others. Reads from the start; the cache lives as long as the reader. To be called without gradients.
    """
    if isinstance(model, Decoder):
        return CacheReader(model, KVCache(model.config, capacity))
    argument = _cache_argument(model)
    return PastReader(model, argument) if argument else None


def _cache_argument(model: nn.Module) -> str | None:
    """The argument for the keys and values of a model of `transformers`; its output has them by the same name."""
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    # A state-space or linear attention layer goes on from its state by one token only: pieces would be read wrongly.
    if encodes or getattr(model, "_is_stateful", False):
        return None
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" in parameters:
        return "past_key_values"
    # The name since transformers 5.24. Other code means other things by it, as XLM does with a dict.
    is_generator = callable(getattr(model, "prepare_inputs_for_generation", None))
    return "cache" if is_generator and "cache" in parameters and "dict" not in str(parameters["cache"]) else None


class CacheReader:
    """Reads with a `Decoder`."""

    def __init__(self, model: Decoder, cache: KVCache):
        self.model, self.cache = model, cache

    def __call__(self, ids: Tensor) -> Tensor:
        return self.model(ids, cache=self.cache).logits

    def cached(self) -> Iterator[Tensor]:
        return tensors_within(self.cache)


class PastReader:
    """Reads with a model of `transformers`, which makes the kind of cache that it needs itself."""

    def __init__(self, model: nn.Module, argument: str):
        self.model, self.argument = model, argument
        self.past: Any = None

    def __call__(self, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, use_cache=True, **{self.argument: self.past})
        self.past = getattr(output, self.argument)
        if self.past is None:
            raise ModelError(f"{type(self.model).__name__} gave no cache of keys and values back: read the text whole")
        return output.logits

    def cached(self) -> Iterator[Tensor]:
        return tensors_within(self.past)


def tensors_within(item: Any, depth: int = 5) -> Iterator[Tensor]:
    """The tensors in the attributes and containers of an object that is no module."""
    if isinstance(item, Tensor):
        yield item
    elif depth and not isinstance(item, nn.Module | type):
        inside = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        for child in [*inside, *getattr(item, "__dict__", {}).values()]:
            yield from tensors_within(child, depth - 1)


def pieces(ids: Tensor, size: int) -> Iterator[Tensor]:
    """`ids` (B, T) in pieces of `size` tokens, the last one shorter."""
    yield from ids.split(size, dim=1)
