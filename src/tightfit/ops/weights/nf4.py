"""A frozen linear layer with a 4-bit weight. Importing this file requires bitsandbytes."""

import importlib
from typing import Any, Self

import torch
from torch import Tensor, nn

_package: Any = importlib.import_module("bitsandbytes")
_Linear4bit: Any = _package.nn.Linear4bit


class NF4Linear(_Linear4bit):
    """`x @ weight.T + bias` with a weight in 4-bit NormalFloat, in the dtype of x, or of autocast.

    Only the weight of the bitsandbytes layer is used. The layer itself fixes its dtype by its first input, ignores
    autocast, casts its bias in place, and repacks its weight in evaluation to a form that cannot be trained on.
    """

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """The layer with its weight quantised on the weight's own device. It shares the bias."""
        packed = cls(
            layer.in_features, layer.out_features, bias=layer.bias is not None, quant_type="nf4", device="meta"
        )
        packed.weight = _package.nn.Params4bit(
            layer.weight.detach(),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=False,  # 8-bit scales save 0.37 bits a weight, and need one more operator per product
            module=packed,
        )
        packed.bias = layer.bias
        packed.train(layer.training)
        return packed.to(layer.weight.device)  # bitsandbytes quantises in `to`

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _package.matmul_4bit(x, self.weight, bias=bias, quant_state=self.weight.quant_state)
