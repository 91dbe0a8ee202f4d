"""What a step moves before its update, as it was: to undo a step that was cut.

Weights and optimizer states move in the update alone, which is never cut.
"""

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class BeforeStep:
    """Gradients, buffers and random numbers as they are now; of the buffers, copies of those in `moving` alone."""

    def __init__(self, model: nn.Module, moving: frozenset[str]):
        self.model = model
        self.versions = _versions(model)
        self.copies = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name in moving}
        self.random = random_states()

    def restore(self) -> bool:
        """Put everything back. False where a buffer has moved that was not known to: then the step cannot be undone."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.copies:
                    buffer.copy_(self.copies[name])
        set_random_states(self.random)
        return not (self.moved() - self.copies.keys())

    def moved(self) -> frozenset[str]:
        """The buffers that were written or replaced since."""
        return frozenset(name for name, now in _versions(self.model).items() if self.versions.get(name) != now)


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Each buffer's memory and its count of in-place writes: both the same, and nobody wrote into it."""
    return {name: (buffer.data_ptr(), buffer._version) for name, buffer in model.named_buffers()}


def persistent_buffers(model: nn.Module) -> frozenset[str]:
    """Those in the state dict: statistics that a forward moves. The others are tables that follow from the config."""
    kept = model.state_dict(keep_vars=True)
    held = {id(tensor) for tensor in kept.values() if isinstance(tensor, Tensor)}
    return frozenset(name for name, buffer in model.named_buffers() if id(buffer) in held)


def random_states() -> dict[str, Any]:
    """Every generator that a training may draw from: PyTorch's on the CPU and each CUDA device, Python's, numpy's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    for index, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(state, index)
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
