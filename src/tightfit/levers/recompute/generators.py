"""The state of a random generator before an operator drew from it, so that the draw can be repeated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch.utils._pytree import tree_iter


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on `device` draw from when none is named."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def generator_of(args: tuple, kwargs: dict) -> torch.Generator:
    """The generator that a call draws from: the one it names, else the default of its device."""
    device = kwargs.get("device")
    for argument in tree_iter((args, kwargs)):
        if isinstance(argument, torch.Generator):
            return argument
        if device is None and isinstance(argument, torch.Tensor):
            device = argument.device
    return default_generator(torch.device("cpu") if device is None else torch.device(device))


@dataclass(frozen=True)
class GeneratorState:
    """A generator and its state, held outside the tensor allocator."""

    generator: torch.Generator
    state: bytes

    @classmethod
    def of(cls, generator: torch.Generator) -> "GeneratorState":
        return cls(generator, generator.get_state().numpy().tobytes())

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Inside, the generator draws what it drew then; afterwards it goes on as if nothing had happened."""
        present = GeneratorState.of(self.generator)
        self.put_back()
        try:
            yield
        finally:
            present.put_back()

    def put_back(self) -> None:
        """Let the generator go on from this state."""
        self.generator.set_state(torch.from_numpy(numpy.frombuffer(self.state, dtype=numpy.uint8).copy()))
