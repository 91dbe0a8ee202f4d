"""The dtypes of weights by the names that the configuration has for them."""

import torch
from torch import nn

WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@torch.no_grad()
def convert_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the parameters to a dtype, one at a time; buffers (tables of angles) keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
