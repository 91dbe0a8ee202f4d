"""The optimizer of a training, from its configuration: the same for the plan and for the run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.names import FLASH, facts_of
from tightfit.optim import step_in_backward
from tightfit.optim.by_name import optimizer_by_name
from tightfit.training.config.schema import TrainingConfig

STOCHASTIC = "adamw_bf16_stochastic"


@dataclass(frozen=True)
class OptimizerRecipe:
    """Makes the optimizer over given parameters; a planner makes its own to trace, with the same settings.

    Matrices get weight decay; vectors (norms, biases) do not.
    """

    training: TrainingConfig

    @property
    def kind(self) -> str:
        """The optimizer's name."""
        return self.training.optimizer

    @property
    def step_in_backward(self) -> bool:
        return self.training.step_in_backward

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
        optimizer = optimizer_by_name(optimizer_for(self.training.optimizer, trained), groups, settings)
        return step_in_backward(optimizer, trained).optimizer if self.training.step_in_backward else optimizer


def optimizer_for(name: str, trained: Iterable[nn.Parameter]) -> str:
    """The optimizer that a name means for these weights: `adamw` rounds bf16 ones by chance, since rounding to nearest
    loses every update smaller than 1/512 of its weight, which most are (Zamirai et al. 2020).
    """
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in trained)
    return STOCHASTIC if is_bf16 and name == "adamw" else name


def rounding_note(model: nn.Module, name: str) -> str | None:
    """A line on what becomes of small updates, where bf16 weights are trained by the optimizer of this name."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not any(p.dtype == torch.bfloat16 for p in trained):
        return None
    effective = optimizer_for(name, trained)
    if effective == STOCHASTIC:
        return "weights in bf16: updates are rounded stochastically, so that small ones count on average"
    if effective == FLASH:
        return "weights in bf16: 8 more bits are kept beside them, and small updates count on average"
    if facts_of(effective).needs_bf16:
        return "weights in bf16: the 16 bits that bf16 leaves off are kept beside them, so that small updates count"
    return f"weights in bf16: {name} rounds updates to nearest, which loses small ones; adamw does not"


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of every group, for the steps that follow."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's compiled optimizers read it from memory
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
