"""Repeats the draws of random operators in backward, bit for bit, and leaves the generator as it is."""

from typing import Any

import torch

from tightfit.levers.recompute.generators import GeneratorState, generator_of

STATE_BYTES = 5056  # of a CPU's generator, for graphs that only need a shape


def state_of_generator(device: torch.device) -> torch.Tensor:
    """The state of a device's generator, as a tensor that autograd can hold."""
    # By torch's own functions, which a dry run observes: a state takes memory that no operator shows.
    return torch.get_rng_state() if device.type == "cpu" else getattr(torch, device.type).get_rng_state(device)


class Player:
    """A generator's state in forward, which goes on with each repeated draw."""

    def __init__(self, state: torch.Tensor):
        self.state = state.numpy().tobytes()

    def draw(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        generator = generator_of(args, kwargs)
        present = GeneratorState.of(generator)
        GeneratorState(generator, self.state).put_back()
        try:
            result = operator(*args, **kwargs)
            self.state = GeneratorState.of(generator).state
        finally:
            present.put_back()
        return result


def resumed(state: torch.Tensor) -> Player:
    """A player of the draws that follow a saved state."""
    return Player(state)


def replayed(player: Player, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a random operator with the numbers that forward drew."""
    return player.draw(operator, args, kwargs)
