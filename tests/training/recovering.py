"""Small trainings whose memory runs out at a chosen operator."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tightfit.devices.present import lookup_present
from tightfit.planner.levers import Separation
from tightfit.planner.request import Request
from tightfit.step import StepSettings
from tightfit.training.config import parse_config
from tightfit.training.fitting import Fit, LeversInForce, fit
from tightfit.training.objective import CausalLMLoss, counted, on_device
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.recovering import RecoveringStepper, StepPlanner
from tightfit.training.stepper import Stepper

VOCABULARY, BATCH, LENGTH = 40, 4, 8


class Block(nn.Module):
    """A feed-forward with all that a step may change: running statistics, a counter, random numbers, a list."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1, self.training)
        return x + self.norm(self.down(hidden).transpose(1, 2)).transpose(1, 2)


class Awkward(nn.Module):
    """A language model of two such blocks, which draws from every generator that there is."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.own = torch.Generator().manual_seed(1)
        self.steps: list[float] = []

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.tokens(input_ids)
        noise = torch.empty(1).normal_(generator=self.own).to(hidden.device)
        self.steps.append(random.random() + float(numpy.random.rand()))
        hidden = hidden * (1 + 0.01 * noise * self.steps[-1])
        for block in self.blocks:
            hidden = block(hidden)
        self.seen = hidden.detach().mean()
        return SimpleNamespace(logits=self.head(hidden))


def batch(number: int, length: int = LENGTH) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(number))
    labels = ids.clone()
    labels[0, -3:] = -100
    return counted({"input_ids": ids, "labels": labels})


def config(**sections: Any) -> Any:
    training = {"batch_size": BATCH, "device": "cpu", "learning_rate": 1e-2, **sections.get("training", {})}
    return parse_config({"training": training, "memory": {"levers": "exact", **sections.get("memory", {})}})


@contextmanager
def samples_apart() -> Iterator[None]:
    """A context whose plans may split the batch, although the model's samples are coupled: that is found out, and these
    tests need a step in parts that touches all that a step may change.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "separation", Separation(None, tried=True))
        yield


class Remembered:
    """In the place of a planner, which takes seconds: gives the fits that were made before, one after the other."""

    def __init__(self, fits: Sequence[Fit]):
        self.fits = list(fits)
        self.asked: list[int] = []

    def within(self, batch: Any, budget_bytes: int, **options: Any) -> Fit:
        self.asked.append(budget_bytes)
        torch.rand(1), random.random(), numpy.random.rand()  # making a plan may draw
        return self.fits.pop(0) if len(self.fits) > 1 else self.fits[0]


@dataclass
class Training:
    """A training of some steps, and what is left of it."""

    stepper: Stepper
    notes: list[str]
    length: int = LENGTH

    def run(self, steps: int, around: Any = None) -> list[float]:
        """The losses; `around` gives a context for each step by its number."""
        losses = []
        for number in range(1, steps + 1):
            given = on_device(batch(number, self.length), self.stepper.device)
            with around(number):
                losses.append(self.stepper.attempt(given, number).loss)
        return losses

    def everything(self) -> list[torch.Tensor]:
        """Weights, buffers, optimizer states, random states, and what the model remembers."""
        model, optimizer = self.stepper.model, self.stepper.optimizer
        states = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        drawn.append(float(torch.rand((), device=self.stepper.device)))
        numbers = [*drawn, *model.steps, float(model.seen)]
        left = [*model.parameters(), *model.buffers(), *states, model.own.get_state()]
        return [t.detach().clone() for t in left] + [torch.tensor(numbers, dtype=torch.float64)]


def training(planner: Any = None, settings: Any = None, fitted: Fit | None = None, model: Any = None) -> Training:
    """A new training on fixed seeds; with a planner it recovers."""
    settings = settings or config()
    torch.manual_seed(0)
    model = model or Awkward()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(1)
    notes: list[str] = []
    chosen = settings.training
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": OptimizerRecipe(chosen)(model.parameters()),
        "loss": CausalLMLoss(),
        "settings": StepSettings(chosen.precision, chosen.grad_clip),
        "micro_batches": 1 if fitted is None else fitted.micro_batches,
    }
    if planner is None:
        return Training(Stepper(**parts), notes)
    assert fitted is not None
    levers = LeversInForce(fitted, model)
    levers.__enter__()
    return Training(RecoveringStepper(**parts, levers=levers, planner=planner, note=notes.append), notes)


def plain_fit(settings: Any = None, model: Any = None, length: int = LENGTH) -> Fit:
    settings = settings or config()
    model = model or Awkward()
    return fit(model, batch(1, length), CausalLMLoss(), settings, lookup_present(settings.training.device))


def planner_of(model: nn.Module, settings: Any) -> StepPlanner:
    return StepPlanner(model, CausalLMLoss(), settings, lookup_present(settings.training.device))
