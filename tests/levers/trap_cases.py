"""What a trap is: a stack of three blocks of one kind, and how a step runs through it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from exactness import Loss, sum_of_squares

WIDTH = 8
BLOCKS = 3

CASES: dict[str, "Case"] = {}


def plain_call(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return block(hidden)


class Stack(nn.Module):
    """Three blocks between two projections; `call` is how this model's own code calls a block."""

    def __init__(self, blocks: list[nn.Module], call: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        for layer in self.layers:
            hidden = self.call(layer, hidden)
        return self.head(hidden)


@dataclass(frozen=True)
class Case:
    """One trap: the block that springs it and the step around it."""

    block: Callable[[], nn.Module]
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = plain_call
    loss: Loss = sum_of_squares
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    prepare: Callable[[Stack], Any] = field(default=lambda model: None)
    shape: tuple[int, ...] = (2, 6, WIDTH)

    def build(self) -> tuple[Stack, torch.Tensor]:
        """The same model and the same input at every call."""
        torch.manual_seed(7)
        model = Stack([self.block() for _ in range(BLOCKS)], self.call)
        self.prepare(model)
        inputs = torch.randn(self.shape, requires_grad=True)
        return model.train(), inputs


def trap(name: str, **options: Any) -> Callable[[Any], Any]:
    """Register the decorated block (a class or a function that makes one) as a case."""

    def register(block: Any) -> Any:
        assert name not in CASES
        CASES[name] = Case(block, **options)
        return block

    return register


def side_loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """The default loss plus what the blocks left on themselves as `aux`."""
    return sum_of_squares(model, inputs) + sum(layer.aux for layer in model.layers)


def share_blocks(model: Stack) -> None:
    model.layers[2] = model.layers[0]


def same_parameters(model: Stack) -> None:
    """Tie a weight of every block to the first block's."""
    for layer in model.layers[1:]:
        layer.first.weight = model.layers[0].first.weight


__all__ = ["BLOCKS", "CASES", "WIDTH", "Case", "Stack", "same_parameters", "share_blocks", "side_loss", "trap"]
