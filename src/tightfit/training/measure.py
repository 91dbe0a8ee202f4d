"""What is there before a training step, whose peak `measured_peak` adds to what the step takes."""

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import state_tensors
from tightfit.runtime.nested import tensors_in
from tightfit.tracing.step import plain_tensors

__all__ = ["measured_peak", "resident_tensors"]


def resident_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[Tensor]:
    """Parameters, buffers, tensors that modules hold as plain attributes, the optimizer's states and the batch."""
    return [*model.parameters(), *model.buffers(), *plain_tensors(model), *state_tensors(optimizer), *tensors_in(batch)]
