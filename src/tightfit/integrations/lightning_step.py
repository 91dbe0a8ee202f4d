"""The training step of a `LightningModule` under its `Trainer`, as the planner takes it."""

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError, ModelError
from tightfit.integrations.planning import GuestStep
from tightfit.integrations.recovering import GuestRecovery
from tightfit.runtime.nested import Flattened
from tightfit.step import Batch, Precision

_PRECISIONS: dict[str, Precision] = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_LOGGING = ("log", "log_dict", "print")


class SkippedBatch(ModelError):
    """`training_step` returned None: Lightning goes on to the next batch."""


def refuse_unplannable(trainer: Any, module: Any) -> None:
    """Raise `LeverError` for a training whose step is not that of one batch and one optimizer, taken by Lightning."""
    who = type(module).__name__
    if not module.automatic_optimization:
        raise LeverError(
            f"MemoryBudget: {who} steps its optimizers itself (automatic_optimization=False): "
            "call tightfit.plan with its loss, and apply the plan before fit"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise LeverError(
            f"MemoryBudget: {who}.training_step takes its batches itself (dataloader_iter), so none is there to plan "
            "for: let it take a batch"
        )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, module.parameters())):
        raise LeverError(
            f"MemoryBudget: {who}.configure_optimizers gave no optimizer of its parameters: return one, or train "
            "without the budget"
        )


def lightning_step(trainer: Any, module: Any, batch: Flattened, batch_idx: int) -> GuestStep:
    """The step that the trainer is about to take, with its accumulation, precision, optimizer and clipping.

    Where gradients of the batch before may lie beside the activations, two batches at least count as accumulated: the
    second finds those of the first.
    """
    by_norm = str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm") == "norm"
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def loss(model: nn.Module, flat: Batch) -> torch.Tensor:
        arguments = (batch.restored(flat), batch_idx) if takes_index else (batch.restored(flat),)
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*arguments)
        if output is None:
            raise SkippedBatch(f"{type(model).__name__}.training_step skipped the batch that a plan was made for")
        value = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"{type(model).__name__}.training_step returned no loss: a memory plan needs its backward")
        return value

    optimizer = trainer.optimizers[0]
    return GuestStep(
        model=module,
        loss=loss,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        device=module.device,
        precision=_PRECISIONS.get(str(trainer.precision), "fp32"),
        accumulated=max(trainer.accumulate_grad_batches, 2 if keeps_gradients(trainer, module) else 1),
        grad_clip=(trainer.gradient_clip_val or None) if by_norm else None,
    )


def step_traits(trainer: Any, module: Any) -> Hashable:
    """What may change of the step during a training: accumulation, which parameters are trained, how many of them the
    optimizer has.
    """
    stepped = sum(len(group["params"]) for group in trainer.optimizers[0].param_groups)
    return trainer.accumulate_grad_batches, tuple(p.requires_grad for p in module.parameters()), stepped


def keeps_gradients(trainer: Any, module: Any) -> bool:
    """Whether gradients have to be left there until Lightning drops them, which is between forward and backward of the
    first batch that is accumulated: somebody else than Lightning and PyTorch says how, or may look at them before.
    """
    hooks = [(module, name) for name in ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad")]
    hooks += [(callback, "on_before_zero_grad") for callback in trainer.callbacks]
    hooks += [(optimizer, "zero_grad") for optimizer in trainer.optimizers]
    return not all(_comes_with_the_package(getattr(owner, name)) for owner, name in hooks)


def _comes_with_the_package(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the one of Lightning or PyTorch, and not one that was put in its place."""
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
    """Inside, the module logs nothing: its steps are run dry."""
    own = {name: module.__dict__[name] for name in _LOGGING if name in module.__dict__}
    module.__dict__.update(dict.fromkeys(_LOGGING, _say_nothing))
    try:
        yield
    finally:
        for name in _LOGGING:
            del module.__dict__[name]
        module.__dict__.update(own)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a module's logging."""
