"""A frozen linear layer whose weight is held in 8 bits."""

from typing import Any, Self

import torch
from torch import Tensor, nn

LARGEST = 127  # of a code: symmetric, so -128 is not used


class Int8Linear(nn.Linear):
    """`x @ weight.T + bias`, the weight as int8 codes with an fp32 scale a row (out_features, 1), in the dtype of its
    input or of autocast.

    The weight at full width is there during a product only, forward and backward: it is not kept for backward.
    """

    scale: nn.Parameter

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """The layer with its weight rounded to 8 bits by the largest of each row; the bias is the same tensor."""
        frozen = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        full = layer.weight.detach().float()
        scale = full.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        codes = (full / scale).round().to(torch.int8)
        frozen.weight = nn.Parameter(codes, requires_grad=False)
        frozen.scale = nn.Parameter(scale, requires_grad=False)
        frozen.bias = layer.bias
        return frozen.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        result: Any = _Product.apply(x, self.weight, self.scale)
        return result if self.bias is None else result + self.bias.to(x.dtype)

    def widened(self) -> Tensor:
        """The weight that the codes stand for, fp32 (out_features, in_features)."""
        return widened(self.weight, self.scale, torch.float32)


def widened(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times the scale of their row."""
    return codes.to(dtype).mul_(scale.to(dtype))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ widened(codes, scale, x.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:
        codes, scale = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ widened(codes, scale, gradient.dtype) if ctx.needs_input_grad[0] else None, None, None
