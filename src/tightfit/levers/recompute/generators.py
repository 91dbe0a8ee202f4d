"""Saves the state of a random generator before an operator draws from it, so that a replay repeats the draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch.utils._pytree import tree_iter

from tightfit.runtime.operators import Traits
from tightfit.runtime.simulation import host_memory, simulation


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on `device` draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def generator_of(args: tuple, kwargs: dict) -> torch.Generator:
    """The generator that a call draws from: its argument `generator`, else the default of its device."""
    device = kwargs.get("device")
    for argument in tree_iter((args, kwargs)):
        if isinstance(argument, torch.Generator):
            return argument
        if device is None and isinstance(argument, torch.Tensor):
            device = argument.device
    return default_generator(torch.device("cpu") if device is None else torch.device(device))


def draws(traits: Traits, args: tuple, kwargs: dict) -> bool:
    """True if a call draws random numbers: attention without dropout does not, though its operator may."""
    if traits.dropout is None:
        return traits.is_random
    position, name = traits.dropout
    return traits.is_random and (args[position] if position < len(args) else kwargs.get(name, 0.0)) != 0.0


@dataclass(frozen=True)
class GeneratorState:
    """A generator and its state. The state is bytes, not a tensor, so that it does not count as tensor memory."""

    generator: torch.Generator
    state: bytes

    @classmethod
    def of(cls, generator: torch.Generator) -> "GeneratorState":
        with host_memory():  # whatever the generator's device
            state = generator.get_state()
            # PyTorch's CPU allocator gives a CPU generator's state its memory, and no operator shows that to a dry run.
            # The state of a card's generator is 16 bytes on the host. A CPU's generator plays it in a dry run.
            if simulation.state_read is not None and not simulation.of_cuda:
                simulation.state_read(state)
            return cls(generator, state.numpy().tobytes())

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A context in which the generator repeats the draw. Afterwards it continues from its present state."""
        # Also the user's own generators: a replay that does not rewind them draws new numbers (40 of 45 gradients wrong
        # under PyTorch's checkpoint, with the same loss).
        present = GeneratorState.of(self.generator)
        self.put_back()
        try:
            yield
        finally:
            present.put_back()

    def put_back(self) -> None:
        """Set the generator to this state."""
        with host_memory():
            self.generator.set_state(torch.from_numpy(numpy.frombuffer(self.state, dtype=numpy.uint8).copy()))
