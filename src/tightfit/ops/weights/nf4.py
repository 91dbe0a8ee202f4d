"""A frozen linear layer with a 4-bit weight. Importing this file requires bitsandbytes."""

import functools
import importlib
from typing import Any, Self

import torch
from torch import Tensor, nn

from tightfit.ops.weights.experts import BLOCK
from tightfit.runtime.simulation import simulation

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
        is_odd = self.in_features % BLOCK and x.device.type == "cpu" and not simulation.is_dry
        if is_odd and not reads_rows_of(self.in_features):
            return _NF4Product.apply(x, self.weight, bias, self.weight.quant_state)
        return _package.matmul_4bit(x, self.weight, bias=bias, quant_state=self.weight.quant_state)


class _NF4Product(torch.autograd.Function):
    """bitsandbytes's product (`MatMul4Bit`), with codes that are read as one row. It takes the same memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.state, ctx.has_bias = state, bias is not None
        return nn.functional.linear(x, read_as_one_row(packed, state, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (packed,) = ctx.saved_tensors
        of_x = gradient @ read_as_one_row(packed, ctx.state, gradient.dtype) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None


def read_as_one_row(packed: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight of 4-bit codes, (outputs, inputs)."""
    flat = torch.ops.bitsandbytes.dequantize_4bit(
        packed.data, state.absmax, state.blocksize, state.quant_type, (state.shape.numel(),), dtype
    )
    return flat.view(state.shape)


@functools.cache
def reads_rows_of(count: int) -> bool:
    """True if bitsandbytes reads 4-bit weights rightly on this CPU whose rows have `count` weights.

    bitsandbytes 0.50 does not with AVX512, where a row ends within a block of weights with one scale.
    """
    read = torch.ops.bitsandbytes.dequantize_4bit
    codes, scales = torch.zeros(BLOCK * count // 2, 1, dtype=torch.uint8), torch.arange(1.0, count + 1)
    in_rows = read(codes, scales, BLOCK, "nf4", (BLOCK, count), torch.float32)
    return torch.equal(in_rows.view(-1), read(codes, scales, BLOCK, "nf4", (BLOCK * count,), torch.float32))
