"""The tensors that exist before a training step, whose peak `measured_peak` adds to what the step takes."""

from typing import Any

import torch
from torch import Tensor, nn

from tightfit.levers.stream import rings_on
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import state_tensors
from tightfit.runtime.nested import tensors_in
from tightfit.step import Loss, modules_beside
from tightfit.tracing.step import held_by

__all__ = ["measured_peak", "resident_tensors"]


def resident_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Loss | None = None
) -> list[Tensor]:
    """The tensors that the model holds and those that the loss holds beside it (parameters, buffers, tensors that
    modules hold as plain attributes), the optimizer's states and the batch.

    On a CPU streamed blocks leave: the allocator's record does not see memory leave that was there at its start.
    """
    for ring in rings_on(model):
        if ring.device.type == "cpu":
            ring.empty()
    return [*held_by([model, *modules_beside(loss)]), *state_tensors(optimizer), *tensors_in(batch)]
