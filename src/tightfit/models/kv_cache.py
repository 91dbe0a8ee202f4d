"""Keys and values of what a decoder has read, so that a text can go through it piece by piece."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tightfit.models.decoder_config import DecoderConfig


@dataclass(frozen=True)
class VisibleKeys:
    """Keys and values (B, Hkv, T, D) that the queries of a piece look at; the first query stands at key `offset`."""

    keys: Tensor
    values: Tensor
    offset: int


class WholeCache:
    """One layer's keys and values of everything read, in room for `capacity` tokens from the start.

    Growing the room piece by piece would hold them twice.
    """

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys = self.values = torch.empty(0)

    def read(self, keys: Tensor, values: Tensor) -> VisibleKeys:
        """Take in the keys and values of a piece; returns all that its queries may see."""
        first, self.length = self.length, self.length + keys.shape[2]
        if not first:
            self.keys, self.values = (t.new_empty(*t.shape[:2], self.capacity, t.shape[3]) for t in (keys, values))
        self.keys[:, :, first : self.length] = keys
        self.values[:, :, first : self.length] = values
        return VisibleKeys(self.keys[:, :, : self.length], self.values[:, :, : self.length], first)


class WindowCache:
    """One layer's keys and values of as many tokens as a window still reaches."""

    def __init__(self, window: int):
        self.reach = window - 1
        self.held: tuple[Tensor, Tensor] | None = None

    def read(self, keys: Tensor, values: Tensor) -> VisibleKeys:
        """Take in the keys and values of a piece; returns all that its queries may see."""
        before = 0 if self.held is None else self.held[0].shape[2]
        if self.held is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.held, (keys, values), strict=True))
        cut = max(keys.shape[2] - self.reach, 0)
        self.held = keys[:, :, cut:].clone(), values[:, :, cut:].clone()
        return VisibleKeys(keys, values, before)


class ConvolutionCache:
    """The last inputs of one layer's convolution, as many as its kernel reaches behind a token."""

    def __init__(self, kernel: int):
        self.reach = kernel - 1
        self.held: Tensor | None = None

    def read(self, values: Tensor) -> Tensor:
        """Take in a piece (B, T, C); returns it behind the `reach` values before it, zeros where there were none."""
        held = values.new_zeros(len(values), self.reach, values.shape[2]) if self.held is None else self.held
        seen = torch.cat((held, values), dim=1)
        self.held = seen[:, seen.shape[1] - self.reach :].clone()
        return seen


LayerCache = WholeCache | WindowCache | ConvolutionCache


class KVCache:
    """The keys and values that a `Decoder` has computed for one batch of texts; mutable, for one reading, without
    gradients.

    `capacity` is the most tokens that will be read; a decoder with a window needs room for the window only.
    """

    def __init__(self, config: DecoderConfig, capacity: int):
        self.length = 0
        self.layers = [_layer_cache(config, layer, capacity) for layer in range(config.num_layers)]


def _layer_cache(config: DecoderConfig, layer: int, capacity: int) -> LayerCache:
    if config.conv_kernel is not None and not config.has_attention(layer):
        return ConvolutionCache(config.conv_kernel)
    return WholeCache(capacity) if config.attention_window is None else WindowCache(config.attention_window)
