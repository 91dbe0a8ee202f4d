"""The training step of a `LightningModule` under its `Trainer`, as the planner takes it."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tightfit.errors import ModelError
from tightfit.integrations.planning import GuestStep
from tightfit.step import Batch, Precision

_PRECISIONS: dict[str, Precision] = {"bf16-mixed": "bf16", "16-mixed": "fp16"}
_LOGGING = ("log", "log_dict", "print")


@dataclass(frozen=True)
class Flattened:
    """A batch of whatever structure as a tuple, and the way back."""

    leaves: tuple[Any, ...]
    restored: Callable[[Batch], Any]


def flattened(batch: Any) -> Flattened:
    """Dicts, lists and tuples, however nested; mappings of other classes are made anew from a dict."""
    other: Any = type(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else None
    leaves, spec = tree_flatten(batch if other is None else dict(batch))

    def restored(flat: Batch) -> Any:
        found = tree_unflatten(list(flat), spec)
        return found if other is None else other(found)

    return Flattened(tuple(leaves), restored)


def lightning_step(trainer: Any, module: Any, batch: Flattened, batch_idx: int) -> GuestStep:
    """The step that the trainer is about to take, with its accumulation, precision, optimizer and clipping."""
    by_norm = str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm") == "norm"
    takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def loss(model: nn.Module, flat: Batch) -> torch.Tensor:
        arguments = (batch.restored(flat), batch_idx) if takes_index else (batch.restored(flat),)
        with trainer.precision_plugin.train_step_context():
            output = module.training_step(*arguments)
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
        accumulated=trainer.accumulate_grad_batches,
        grad_clip=(trainer.gradient_clip_val or None) if by_norm else None,
    )


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
