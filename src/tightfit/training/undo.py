"""A step that was cut before its update is undone: what it has moved until then is put back.

Weights and optimizer states move in the update alone, which is never cut.
"""

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn


class StepUndo:
    """Mutable: the buffers and random numbers of a model as they were when its step began. Gradients there were none.

    Of the buffers, copies are made of those in the state dict (statistics that a forward moves) and of those that an
    earlier step has moved; the others are tables that follow from the configuration.
    """

    def __init__(self, model: nn.Module):
        self._parameters = list(model.parameters())
        places = {
            (f"{path}.{name}" if path else name): (module, name)
            for path, module in model.named_modules()
            for name in module._buffers
        }
        self._places = places
        self._moving = {key for key, (module, name) in places.items() if name not in module._non_persistent_buffers_set}
        self.begin()

    def begin(self) -> None:
        """Remember how everything is now."""
        self._versions = self._now()
        self._copies = {key: buffer.detach().clone() for key, buffer in self._buffers() if key in self._moving}
        self._random = _random_states()

    def end(self) -> None:
        """A step was made: the buffers that it moved will be copied from now on."""
        self._moving |= self._moved()

    def undo(self) -> bool:
        """Put everything back, and drop the gradients. False where a buffer has moved that no step had moved before:
        then the step cannot be undone.
        """
        unknown = self._moved() - self._copies.keys()
        for parameter in self._parameters:
            parameter.grad = None
        with torch.no_grad():
            for key, buffer in self._buffers():
                if key in self._copies:
                    buffer.copy_(self._copies[key])
        _set_random_states(self._random)
        return not unknown

    def _buffers(self) -> list[tuple[str, Tensor]]:
        held = [(key, module._buffers[name]) for key, (module, name) in self._places.items()]
        return [(key, buffer) for key, buffer in held if buffer is not None]

    def _now(self) -> dict[str, tuple[int, int]]:
        """Each buffer's memory and its count of in-place writes: both the same, and nobody wrote into it."""
        return {key: (buffer.data_ptr(), buffer._version) for key, buffer in self._buffers()}

    def _moved(self) -> set[str]:
        return {key for key, now in self._now().items() if self._versions.get(key) != now}


def _random_states() -> dict[str, Any]:
    """Every generator that a step may draw from: PyTorch's on the CPU and each CUDA device, Python's, numpy's."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    for index, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(state, index)
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
