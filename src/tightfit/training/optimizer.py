"""The optimizer of a training, from its configuration: the same for the plan and for the run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.config.schema import TrainingConfig
from tightfit.optim import step_in_backward
from tightfit.optim.by_name import optimizer_by_name


@dataclass(frozen=True)
class OptimizerRecipe:
    """Makes the optimizer over given parameters; a planner makes its own to trace, with the same settings.

    Matrices get weight decay; vectors (norms, biases) do not.
    """

    training: TrainingConfig

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
        decay = self.training.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": members, "weight_decay": weight_decay}
            for members, weight_decay in ((matrices, decay), (vectors, 0.0))
            if members
        ]
        settings = {"lr": self.training.learning_rate, "betas": self.training.betas, "eps": self.training.eps}
        optimizer = optimizer_by_name(self.training.optimizer, groups, settings)
        return step_in_backward(optimizer, trained).optimizer if self.training.step_in_backward else optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of every group, for the steps that follow."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's compiled optimizers read it from memory
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
