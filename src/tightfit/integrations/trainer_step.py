"""The training step of a `transformers.Trainer`, whichever subclass it is, as the planner takes it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tightfit.integrations.batches import worst_batches
from tightfit.integrations.planning import GuestStep
from tightfit.integrations.weighing import NEXT_TOKENS, SUM, Weighing
from tightfit.step import AUTOCAST_DTYPES, Batch
from tightfit.tracing.restore import Contents

if TYPE_CHECKING:
    from transformers import Trainer

_INPUTS = ("train_dataset", "eval_dataset")  # may be lists as long as the training, and no step writes them


class TrainerLoss:
    """What a trainer computes of one batch: its own `compute_loss`, in its own precision.

    Where losses of micro-batches add up as they are, `reduction` is "sum"; else they count by what `count` finds.
    """

    def __init__(self, trainer: "Trainer", items: Any, weighing: Weighing | None = None):
        self.trainer = trainer
        self.items = items
        weighing = weighing or (SUM if adds_up(trainer, items) else NEXT_TOKENS)
        self.reduction = "sum" if weighing.count is None else "mean"
        self.count = weighing.count

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with self.trainer.compute_loss_context_manager():
            loss: Any = self.trainer.compute_loss(model, dict(batch), num_items_in_batch=self.items)
        return loss


def adds_up(trainer: "Trainer", items: Any) -> bool:
    """Whether the loss of a batch is already its part of the whole update's, as `Trainer.training_step` decides it. It
    goes by signatures, which is right for causal language models.
    """
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
    if stated is not None:
        return stated
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def trainer_batches(trainer: "Trainer", loader: Any, max_length: int | None) -> list[Batch]:
    """What the trainer's batches can be at most, collated and prepared as it does it."""
    size = trainer.state.train_batch_size or trainer.args.train_batch_size

    def collate(samples: list[Any]) -> Batch:
        return trainer._prepare_inputs(dict(loader.collate_fn(samples)))

    with _random_state_kept():
        return worst_batches(loader.dataset, size, collate, max_length)


def trainer_step(trainer: "Trainer", model: nn.Module, batch: Mapping[str, Any]) -> GuestStep:
    """The step that the trainer is about to take, with its accumulation, precision, optimizer and clipping."""
    args = trainer.args
    accumulated = args.gradient_accumulation_steps
    _, items = trainer.get_batch_samples(iter([dict(batch)] * accumulated), accumulated, torch.device("cpu"))
    optimizer: Any = trainer.optimizer
    mixed: Any = trainer.accelerator.mixed_precision
    return GuestStep(
        model=model,
        loss=TrainerLoss(trainer, items),
        optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper
        device=args.device,
        precision=mixed if mixed in AUTOCAST_DTYPES else "fp32",
        accumulated=accumulated,
        grad_clip=args.max_grad_norm or None,
    )


@contextmanager
def nothing_noted(trainer: "Trainer") -> Iterator[None]:
    """Inside, steps may be run dry: nothing is logged, and what the trainer counts and collects is afterwards as it
    was.
    """
    attributes = trainer.__dict__
    before = dict(attributes)
    collected = Contents((value for name, value in before.items() if name not in _INPUTS), in_objects=False)
    attributes["log"] = _say_nothing
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)
        collected.restore()


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a trainer's logging."""


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Collators may draw random numbers: the training draws the same ones as without a plan."""
    import random

    import numpy

    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])
