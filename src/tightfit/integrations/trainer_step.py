"""The training step of a `transformers.Trainer`, or any subclass, for the planner."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.integrations.batches import worst_batches
from tightfit.integrations.model_ranks import ALONE, ModelRanks
from tightfit.integrations.planning import GuestStep
from tightfit.integrations.rollouts import generates, rollout_batches
from tightfit.integrations.weighing import NEXT_TOKENS, SUM, Weighing
from tightfit.planner.request import Request
from tightfit.step import AUTOCAST_DTYPES, Batch
from tightfit.tracing.restore import Contents, generators_restored

if TYPE_CHECKING:
    from transformers import Trainer

_INPUTS = ("train_dataset", "eval_dataset")  # not saved and restored: they may be long lists, and no step writes them


class TrainerLoss:
    """A trainer's own `compute_loss` of one batch, in its own precision.

    `reduction` is "sum" if losses of micro-batches add up without weights. Otherwise `count` gives their weights.
    """

    def __init__(self, trainer: "Trainer", items: Any, weighing: Weighing | None = None):
        self.trainer = trainer
        self.items = items
        weighing = weighing or (SUM if adds_up(trainer, items) else NEXT_TOKENS)
        self.reduction = "sum" if weighing.count is None else "mean"
        self.count = weighing.count

    @property
    def modules_beside(self) -> tuple[nn.Module, ...]:
        """The modules that the trainer holds beside the model, as a reference model (trl's DPO) or reward models."""
        held: list[Any] = []
        for value in vars(self.trainer).values():
            held += value if isinstance(value, list | tuple) else [value]
        model = self.trainer.model
        assert model is not None, "a trainer that trains has a model"
        trained = set(model.parameters())
        return tuple(each for each in held if isinstance(each, nn.Module) and trained.isdisjoint(each.parameters()))

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with self.trainer.compute_loss_context_manager():
            loss: Any = self.trainer.compute_loss(model, dict(batch), num_items_in_batch=self.items)
        return loss


def adds_up(trainer: "Trainer", items: Any) -> bool:
    """True if the loss of a batch is already its share of the update's loss, as `Trainer.training_step` decides."""
    # The trainer decides by signatures, which is right for causal language models. A classifier whose `forward` has
    # `**kwargs` got four times the gradient that way, so planned micro-batches are measured (`weighing.py`).
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
    if stated is not None:
        return stated
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def trainer_batches(trainer: "Trainer", loader: Any, max_length: int | None) -> list[Batch]:
    """The worst batches of the trainer's data set, collated and prepared by the trainer."""
    if generates(trainer):
        return rollout_batches(trainer, loader.dataset, max_length)
    size = trainer.state.train_batch_size or trainer.args.train_batch_size

    def collate(samples: list[Any]) -> Batch:
        batch = loader.collate_fn(samples)
        if not isinstance(batch, Mapping):
            raise InputError(
                f"the batches of {type(trainer).__name__} are a {type(batch).__name__} of rows, and its step makes the "
                "tensors itself: no plan can be made before that: plan the model on a batch of such tensors "
                "(tightfit.plan), apply the plan (plan.apply(model)) and leave MemoryBudget out"
            )
        return trainer._prepare_inputs(dict(batch))

    # Collators may draw random numbers. The training must draw the same ones as without a plan.
    with generators_restored():
        return worst_batches(loader.dataset, size, collate, max_length)


def trainer_step(
    trainer: "Trainer", model: nn.Module, batch: Mapping[str, Any], ranks: ModelRanks = ALONE
) -> GuestStep:
    """The next step of the trainer, with its accumulation, precision, optimizer, clipping and ranks."""
    args = trainer.args
    accumulated = args.gradient_accumulation_steps
    # The trainer's loop sets it when an update begins, and some losses (trl's) read it.
    vars(trainer).setdefault("current_gradient_accumulation_steps", accumulated)
    # Ranks add their counts up, which NCCL does on cards only.
    _, items = trainer.get_batch_samples(iter([dict(batch)] * accumulated), accumulated, args.device)
    items = items.cpu() if isinstance(items, torch.Tensor) else items
    optimizer: Any = trainer.optimizer
    mixed: Any = trainer.accelerator.mixed_precision
    request = Request.of(
        model,
        None,
        loss=TrainerLoss(trainer, items),
        optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate wraps the optimizer
        device=args.device,
        precision=mixed if mixed in AUTOCAST_DTYPES else "fp32",
        micro_batches=accumulated,
        grad_clip=args.max_grad_norm or None,
        steps=max(1, trainer.state.max_steps - trainer.state.global_step),
    )
    return GuestStep(request, ranks)


@contextmanager
def nothing_noted(trainer: "Trainer") -> Iterator[None]:
    """A context for dry runs of a trainer's step: nothing is logged, and the trainer's counts are restored."""
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
    """Replaces a trainer's logging."""
