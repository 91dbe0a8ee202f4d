"""The training step of a `LightningModule` under its `Trainer`, for the planner."""

import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError, ModelError
from tightfit.integrations.model_ranks import ALONE, ModelRanks
from tightfit.integrations.planning import GuestStep
from tightfit.integrations.recovering import GuestRecovery
from tightfit.planner.request import Request
from tightfit.runtime.nested import Flattened
from tightfit.step import Batch, Precision

_PRECISIONS: dict[str, Precision] = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_LOGGING = ("log", "log_dict", "print")


class SkippedBatch(ModelError):
    """`training_step` returned None, so Lightning skips the batch."""


def refuse_unplannable(trainer: Any, module: Any) -> None:
    """Raise `LeverError` unless Lightning itself runs the step, with one batch and an optimizer of the module."""
    who = type(module).__name__
    if not module.automatic_optimization:
        raise LeverError(
            f"MemoryBudget: {who} steps its optimizers itself (automatic_optimization=False): "
            "call tightfit.plan with its loss, and apply the plan before fit"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise LeverError(
            f"MemoryBudget: {who}.training_step fetches its batches itself (dataloader_iter), so there is no batch to "
            "plan for: give it a parameter batch"
        )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, module.parameters())):
        raise LeverError(
            f"MemoryBudget: {who}.configure_optimizers returned no optimizer of its parameters: return one, or train "
            "without the budget"
        )


def lightning_step(trainer: Any, module: Any, batch: Flattened, batch_idx: int, ranks: ModelRanks = ALONE) -> GuestStep:
    """The next step of the trainer, with its accumulation, precision, optimizer, clipping and ranks.

    If gradients of the previous batch may exist besides the activations, at least two batches count as accumulated,
    because the second one finds the gradients of the first.
    """
    by_norm = str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm") == "norm"
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def loss(model: nn.Module, flat: Batch) -> torch.Tensor:
        arguments = (batch.restored(flat), batch_idx) if takes_index else (batch.restored(flat),)
        with trainer.precision_plugin.train_step_context():
            output = _trained_step(trainer, module, model, arguments)
        if output is None:
            raise SkippedBatch(f"{type(model).__name__}.training_step skipped the batch that a plan was made for")
        value = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{type(model).__name__}.training_step returned no loss: a memory plan needs its backward")
        return value

    optimizer = trainer.optimizers[0]
    request = Request.of(
        module,
        None,
        loss=loss,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        device=module.device,
        precision=_PRECISIONS.get(str(trainer.precision), "fp32"),
        micro_batches=max(trainer.accumulate_grad_batches, 2 if keeps_gradients(trainer, module) else 1),
        grad_clip=(trainer.gradient_clip_val or None) if by_norm else None,
        steps=steps_to_come(trainer),
    )
    return GuestStep(request, ranks)


def _trained_step(trainer: Any, module: Any, model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The result of `training_step`: of the module, or of a rank's copy of it, through the DDP around that."""
    if model is module:
        return module.training_step(*arguments)
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    own: Any = model.module if is_ddp else model
    own.trainer = trainer  # which Lightning leaves out of copies
    if not is_ddp:
        return own.training_step(*arguments)
    forward = own.forward

    def redirected(*args: Any, **kwargs: Any) -> Any:
        own.forward = forward  # the step may call it
        return own.training_step(*args, **kwargs)

    own.forward = redirected  # as Lightning does: DDP knows no other method
    return model(*arguments)


def steps_to_come(trainer: Any) -> int | None:
    """The updates that the trainer will still run. None if neither its limits nor the data say how many."""
    left = trainer.estimated_stepping_batches - trainer.global_step
    return int(left) if 1 <= left < math.inf else None


def step_traits(trainer: Any, module: Any) -> Hashable:
    """The properties of the step that may change during a training: accumulation, the trained parameters, and the
    number of the optimizer's parameters.
    """
    stepped = sum(len(group["params"]) for group in trainer.optimizers[0].param_groups)
    return trainer.accumulate_grad_batches, tuple(p.requires_grad for p in module.parameters()), stepped


def keeps_gradients(trainer: Any, module: Any) -> bool:
    """True if gradients must remain until Lightning drops them, which happens after the next batch's forward.

    That is so if code other than Lightning's or PyTorch's drops them, or may read them before.
    """
    hooks = [(module, name) for name in ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")]
    hooks += [(callback, "on_before_zero_grad") for callback in trainer.callbacks]
    hooks += [(optimizer, "zero_grad") for optimizer in trainer.optimizers]
    return not all(_comes_with_the_package(getattr(owner, name)) for owner, name in hooks)


def _comes_with_the_package(hook: Callable[..., Any]) -> bool:
    """True if a hook is Lightning's or PyTorch's own, and not an override."""
    return str(hook.__module__).split(".")[0] in ("lightning", "pytorch_lightning", "torch")


def watch_closures(trainer: Any, recovery: GuestRecovery) -> None:
    """Recover in forward and backward of each batch, which Lightning gives to the optimizer as a closure."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def watched(*args: Any, **kwargs: Any) -> Any:
        closure = make(*args, **kwargs)
        closure.closure = recovery.watched(closure.closure)  # it lives as long as its batch
        return closure

    recovery.replace(loop, "_make_closure", watched)


@contextmanager
def muted(module: Any) -> Iterator[None]:
    """A context in which the module logs nothing, because its steps run dry."""
    own = {name: module.__dict__[name] for name in _LOGGING if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(_LOGGING, _say_nothing))
    try:
        yield
    finally:
        for name in _LOGGING:
            del module.__dict__[name]
        module.__dict__.update(own)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a module's logging."""
