"""A depthwise causal convolution that mixes neighbouring tokens, in the place of attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.kv_cache import ConvolutionCache


class ShortConvolution(nn.Module):
    """out(c * convolution(b * y)) with (b, c, y) three projections of x: the gated short convolution of LFM2 (Liquid AI
    2025). Each channel has a filter of its own over the last `conv_kernel` tokens.

    The filter is a sum over shifted tokens. In a packed row a token before the document's beginning counts as zero,
    which a library's convolution has no way to say.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        assert config.conv_kernel is not None, "a convolution has a kernel"
        self.kernel = config.conv_kernel
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        # The layout of `nn.Conv1d`'s weight; the last tap is the token's own. Begun as PyTorch begins a convolution.
        self.taps = nn.Parameter(torch.empty(config.hidden_size, 1, self.kernel))
        nn.init.uniform_(self.taps, -(self.kernel**-0.5), self.kernel**-0.5)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: ConvolutionCache | None = None, document_ids: Tensor | None = None) -> Tensor:
        before, after, value = self.in_proj(x).chunk(3, dim=-1)
        value = before * value
        reach = self.kernel - 1
        seen = F.pad(value, (0, 0, reach, 0)) if cache is None else cache.read(value)
        return self.o_proj(after * self._mixed(seen, x.shape[1], document_ids))

    def _mixed(self, seen: Tensor, length: int, document_ids: Tensor | None) -> Tensor:
        """The filter over `seen` (B, kernel - 1 + T, C), (B, T, C)."""
        taps = self.taps.to(seen.dtype).squeeze(1).unbind(-1)
        mixed = seen[:, self.kernel - 1 :] * taps[-1]
        for shift in range(1, self.kernel):
            first = self.kernel - 1 - shift
            term = seen[:, first : first + length] * taps[-1 - shift]
            if document_ids is not None:
                term = term * same_document(document_ids, shift).unsqueeze(-1)
            mixed = mixed + term
        return mixed


def same_document(document_ids: Tensor, shift: int) -> Tensor:
    """(B, T) booleans: the token `shift` places before is of the same document."""
    before = F.pad(document_ids, (shift, 0), value=-1)[:, : document_ids.shape[1]]
    return before == document_ids
