"""One training step, defined once: the dry run, the verification, the benchmarks and the trainer all run this.

A step runs forward, loss and backward for each micro-batch, then clipping and the optimizer. Then it sets gradients to
None, or to zero if the user's own loop does that.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from tightfit.errors import InputError, ModelError

Precision = Literal["fp32", "bf16", "fp16"]
Batch = Any  # a dict (passed as keywords), a tuple (positional) or a TokenBatch
Loss = Callable[[nn.Module, Batch], torch.Tensor]
Optimizer = str | torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


_accumulating = 0  # depth; of all threads: the loop's thread sets it, and backward reads it, perhaps in another one


@contextmanager
def accumulation() -> Iterator[None]:
    """A context for a backward that is not the last one before the optimizer's step."""
    global _accumulating
    _accumulating += 1
    try:
        yield
    finally:
        _accumulating -= 1


def is_accumulating() -> bool:
    """True if the running backward is not the last one before the optimizer's step."""
    return _accumulating > 0


class TokenBatch(NamedTuple):
    """The shape of a batch of token ids, in place of a real batch."""

    size: int
    length: int
    vocab_size: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, int64 (size, length), all ids below the vocabulary size."""
        ids = (torch.arange(self.size * self.length) * 7919 % self.vocab_size).view(self.size, self.length)
        return {"input_ids": ids, "labels": ids.clone()}


def model_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that the model computes itself: `model(**batch).loss`, or its last scalar result."""
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    # A result with an empty field for the loss has no loss. Its other scalars are something else (an auxiliary loss).
    if loss is None and isinstance(outputs, tuple | list) and not hasattr(outputs, "loss"):
        loss = next((o for o in reversed(outputs) if isinstance(o, torch.Tensor) and o.dim() == 0), None)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise ModelError(
            f"{type(model).__name__} returned no scalar loss: "
            "put labels in the batch, or pass loss=callable(model, batch)"
        )
    return loss


def modules_beside(loss: Loss | None) -> tuple[nn.Module, ...]:
    """The modules that a loss runs beside the model and does not train (`loss.modules_beside`): the teacher of a
    distillation.

    They are in memory for as long as the training runs, so predictions and measurements count them.
    """
    return tuple(getattr(loss, "modules_beside", ()))


def _checked(loss: Any) -> torch.Tensor:
    """Check that backward can begin at the result of a loss function. Raises `ModelError`."""
    if not isinstance(loss, torch.Tensor):
        raise ModelError(f"the loss is a {type(loss).__name__}, wanted a tensor of one number")
    if loss.numel() != 1:
        raise ModelError(f"the loss has the shape {tuple(loss.shape)}, wanted one number: take its mean or sum")
    if not loss.requires_grad:
        raise ModelError("the loss depends on no parameter that is trained: it was detached, or computed without them")
    return loss


class Observer(Protocol):
    """An observer of a step's phases."""

    def phase(self, name: str) -> AbstractContextManager[Any]: ...


class NoObserver:
    """An observer that does nothing."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class StepSettings:
    """How a step is computed, apart from model and data."""

    precision: Precision = "fp32"
    grad_clip: float | None = None
    keep_gradients: bool = False  # gradients are set to zero after a step, not to None, so they keep their memory
    step_in_backward: bool = False  # each weight is updated once its gradient is ready, which is freed then


@dataclass(frozen=True)
class Step:
    """One training step: what is computed, on which device, by how many ranks.

    Args:
        model: The module that is trained. Its parameters may be on meta: nothing is computed with them.
        batch: A dict (passed as keywords), a tuple (positional) or `TokenBatch(size, length, vocab_size)`; that of one
            rank and one update.
        loss: `callable(model, batch) -> scalar tensor`. None means `model(**batch).loss`.
        optimizer: A name, an optimizer, or a callable that takes the parameters and returns one.
        precision: `"fp32"`, or autocast to `"bf16"` or `"fp16"`.
        device: None (the one present), a `torch.device`, a name such as `"rtx4090"`, or a name with figures of your
            own: `"rtx3080,memory=8GiB"`.
        micro_batches: Equal parts of the batch whose gradients accumulate; `"auto"` leaves their number to a plan.
        grad_clip: The norm to which gradients are clipped; None clips nothing.
        keep_gradients: The loop sets gradients to zero after a step, not to None, so the next step begins with them.
            None assumes this if the model has gradients now and all of them are zero.
        step_in_backward: Each weight is updated once its gradient is ready, which excludes clipping and fp16.
        world_size: Ranks that train together, each with `device`. None is one process.
        nodes: Machines that the ranks are on (1).
        parallel: `"fsdp2"` (the default of several ranks), `"hsdp"`, `"ddp"`, `"tp"` or `"cp"`.
        ddp: Arguments of `DistributedDataParallel` beside the model, and `"no_sync": False`, which says that every
            micro-batch adds up its gradients.

    Example:
        >>> import tightfit, torch
        >>> def loss(model, batch):
        ...     return model(*batch).square().mean()
        >>> step = tightfit.Step(torch.nn.Linear(16, 16), (torch.randn(8, 16),), loss=loss, device="rtx4090")
        >>> tightfit.estimate(step).fits
        True
    """

    model: nn.Module
    batch: Batch
    loss: Loss | None = None
    optimizer: Optimizer = "adamw"
    precision: Precision = "fp32"
    device: Any = None
    micro_batches: int | Literal["auto"] = 1
    grad_clip: float | None = None
    keep_gradients: bool | None = None
    step_in_backward: bool = False
    world_size: int | None = None
    nodes: int | None = None
    parallel: str | None = None
    ddp: Mapping[str, Any] | None = None


class Part(NamedTuple):
    """A micro-batch, and the weight of its loss in the loss of the whole batch."""

    batch: Batch
    weight: float


@contextmanager
def autocast(precision: Precision, device_type: str) -> Iterator[None]:
    """The autocast context of a precision. It does nothing for fp32."""
    dtype = AUTOCAST_DTYPES.get(precision)
    with nullcontext() if dtype is None else torch.autocast(device_type, dtype):
        yield


def adding_up(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """A context for forward and backward of a micro-batch: DDP around the model adds up gradients in the last one.

    So does a model with a `no_sync` of its own, which a simulated rank of FSDP2 may have.
    """
    is_joined = isinstance(model, nn.parallel.DistributedDataParallel) or "no_sync" in vars(model)
    own: Any = model
    return own.no_sync() if is_joined and not last else nullcontext()


def forward_backward(
    model: nn.Module,
    parts: list[Part],
    loss: Loss,
    precision: Precision = "fp32",
    *,
    scaler: torch.amp.GradScaler | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Accumulate the gradients of all micro-batches, and return the loss of the whole batch, detached."""
    observer = observer or NoObserver()
    device_type = next((p.device.type for p in model.parameters()), "cpu")
    total: torch.Tensor | None = None
    for number, part in enumerate(parts, start=1):
        more_follow = number < len(parts)
        with adding_up(model, last=not more_follow):
            with observer.phase("forward"), autocast(precision, device_type):
                value = _checked(loss(model, part.batch))
                # Weighted before backward. A mean of the micro-batches' means is another loss if they have different
                # numbers of valid tokens (14.5% gradient error on one batch: transformers#34191).
                if part.weight != 1.0:
                    value = value * part.weight
            with observer.phase("backward"), accumulation() if more_follow else nullcontext():
                (value if scaler is None else scaler.scale(value)).backward()
        total = value.detach() if total is None else total + value.detach()
        del value  # its graph must not live during the next micro-batch's forward
    assert total is not None, "a step has at least one micro-batch"
    return total


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    *,
    scaler: torch.amp.GradScaler | None = None,
    observer: Observer | None = None,
) -> torch.Tensor | None:
    """Clip the gradients, step the optimizer, and free the gradients or set them to zero.

    Returns the gradients' norm before clipping, if it was requested.
    """
    with (observer or NoObserver()).phase("optimizer"):
        norm = clip(model, optimizer, settings, scaler)
        if scaler is None:
            stepped(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()  # without it the scale never changes after an overflow
        let_go(optimizer, settings)
    return norm


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's step. Raises `InputError` for one that runs forward and backward again itself (LBFGS, SAM)."""
    try:
        optimizer.step()
    except Exception as error:
        if "closure" not in str(error):
            raise
        raise InputError(
            f"{type(optimizer).__name__}.step() wants a closure: it runs forward and backward again, and a planned "
            "step runs them once: predict the loop with tightfit.trace, or give another optimizer"
        ) from error


def clip(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: StepSettings, scaler: torch.amp.GradScaler | None
) -> torch.Tensor | None:
    """Unscale and clip the gradients, between backward and the optimizer's step.

    Returns their norm before clipping, if it was requested.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)  # before clipping, which would otherwise compare scaled gradients with the limit
    if settings.grad_clip is None:
        return None
    own = model.__dict__.get("clip_grad_norm_")  # of a model in tensor parallel, by the norm over all ranks
    return nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip) if own is None else own(settings.grad_clip)


def let_go(optimizer: torch.optim.Optimizer, settings: StepSettings) -> None:
    """Free the gradients after the optimizer's step, or set them to zero."""
    optimizer.zero_grad(set_to_none=not settings.keep_gradients)
