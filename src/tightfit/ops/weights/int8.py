"""A frozen linear layer with an 8-bit weight: whole numbers, or fp8 as storage."""

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

LARGEST = 127  # the largest code: codes are symmetric, so -128 is not used
FP8 = torch.float8_e4m3fn


class Int8Linear(nn.Linear):
    """`x @ weight.T + bias` in the dtype of x, or of autocast.

    The weight is codes in int8 or fp8 (out_features, in_features) with an fp32 scale for each row (out_features, 1).
    The weight at full width exists only during a product, in forward and in backward. It is not saved for backward.
    """

    scale: nn.Parameter

    @classmethod
    def of(cls, layer: nn.Linear, kind: Literal["int8", "fp8"] = "int8") -> Self:
        """The layer with its weight rounded to 8 bits, scaled by the largest number of each row. It shares the bias."""
        frozen = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        codes, scale = coded(layer.weight.detach(), kind)
        frozen.weight = nn.Parameter(codes, requires_grad=False)
        frozen.scale = nn.Parameter(scale, requires_grad=False)
        frozen.bias = layer.bias
        return frozen.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: Any = _Int8Product.apply(x, self.weight, self.scale)
        return result if self.bias is None else result + self.bias.to(x.dtype)

    def widened(self) -> Tensor:
        """The weight that the codes represent, fp32 (out_features, in_features)."""
        return widened(self.weight, self.scale, torch.float32)


def coded(weight: Tensor, kind: Literal["int8", "fp8"]) -> tuple[Tensor, Tensor]:
    """The codes of a weight (..., rows, columns), and the fp32 scale of each row (..., rows, 1)."""
    full = weight.float()
    largest = LARGEST if kind == "int8" else torch.finfo(FP8).max
    scale = full.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / largest
    codes = full / scale
    return (codes.round().to(torch.int8) if kind == "int8" else codes.to(FP8)), scale


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes (..., rows, columns), each times the scale of its row, in `dtype`."""
    return codes.to(dtype).mul_(scale.to(dtype))


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ widened(codes, scale, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:
        codes, scale = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ widened(codes, scale, gradient.dtype) if ctx.needs_input_grad[0] else None, None, None
