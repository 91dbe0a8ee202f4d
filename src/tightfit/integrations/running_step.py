"""Plans the step of a loop that is running: asked inside the model's first call, before its forward begins."""

import contextlib
import copy
import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import tightfit
from tightfit.devices.present import lookup
from tightfit.errors import ModelError
from tightfit.integrations.batches import ignores_labels, is_mask
from tightfit.integrations.step_source import LOSS, WrittenStep, find_step
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.optim.by_name import state_tensors
from tightfit.planner.levers import allowed_levers
from tightfit.planner.request import Request
from tightfit.runtime.internals import set_version_counters
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch, Part, StepSettings
from tightfit.tracing.restore import everything_restored
from tightfit.tracing.step import plain_tensors

_NOT_THE_LOOPS = (Path(torch.__file__).parent, Path(tightfit.__file__).parent, Path(contextlib.__file__))
_CLIPPED = 1.0  # a norm to clip at: which one makes no difference to memory or time


class WrittenLoss:
    """The loss as the loop computes it: its own lines, run with its own names.

    What the lines bind stays bound until the loop would bind it anew or delete it, as in the loop itself: logits that
    a variable holds on to are there while the optimizer steps.
    """

    def __init__(self, step: WrittenStep, names: dict[str, Any]):
        self.step = step
        self.names = {name: copy.copy(v) if type(v) in (list, dict, set) else v for name, v in names.items()}
        self.given = frozenset(names)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        for name in self.step.dropped - self.given:
            self.names.pop(name, None)
        try:
            exec(self.step.code, self.names)
        except NameError as error:
            where = f"{self.step.file}:{self.step.line}"
            raise ModelError(f"{where}: the step's lines do not stand alone: {error}") from error
        loss = self.names.pop(LOSS, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ModelError(f"{self.step.file}:{self.step.line}: what backward() is called on is no scalar tensor")
        return loss


@dataclass(frozen=True)
class RunningRequest(Request):
    """A step of a running loop, whose micro-batches are the loop's own. `resident` is what lies beside the model."""

    resident: tuple[torch.Tensor, ...] = ()

    def parts(self, micro_batches: int) -> list[Part]:
        return [Part((self.batch, self.resident), 1.0)] * micro_batches


@contextmanager
def running_request(model: nn.Module, *, blocks: str | None = None) -> Iterator[RunningRequest]:
    """What to ask of the planner for the step in which `model` is being called, on this thread.

    The loss are the lines of the loop from the call to `backward()`, the optimizer is the one that holds parameters of
    the model. Inside, the loop's other models may be run dry as well, and no position of the batch is masked, so that
    the plan holds for later batches of its shape; afterwards all is as it was. Only bit-exact levers are allowed.
    Raises `ModelError` where the step cannot be found.
    """
    step = find_step(loop_frames())
    variables = {**step.frame.f_globals, **step.frame.f_locals}
    names = {name: variables[name] for name in step.reads if name in variables}
    here = next(model.parameters()).device
    device = lookup(here)
    others = [m for m in names.values() if isinstance(m, nn.Module) and not _is_part(m, model)]
    if device.kind != "cpu":
        names = {name: _played(value) for name, value in names.items()}
    batch = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    kept = [value for name, value in variables.items() if name not in step.binds]
    optimizer = optimizer_of(model)
    inside = without_states([tensor for tensor in tensors_in(kept) if tensor.device == here], optimizer)
    held = [tensor for other in others for tensor in (*other.parameters(), *other.buffers(), *plain_tensors(other))]
    request = RunningRequest(
        model=model,
        batch=batch,
        loss=WrittenLoss(step, names),
        optimizer=optimizer,
        settings=StepSettings(grad_clip=_CLIPPED if step.clips else None),
        device=device,
        levers=allowed_levers("exact"),
        blocks=blocks,
        micro_batches=step.micro_batches(),
        resident=tuple(inside + held),
    )
    with ExitStack() as stack:
        stack.enter_context(fullest([*batch.values()]))
        for other in others:
            stack.enter_context(everything_restored(other))
        if step.reenters:  # the lines enter autocast themselves
            stack.enter_context(torch.autocast("cpu", enabled=False))
        elif device.kind != "cpu" and torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")))
        stack.callback(forget_locals, step.frame)
        yield request


@contextmanager
def fullest(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, masks (what holds zeros and ones only) are true everywhere and no label is ignored; then as before.

    A loop may drop what is masked before it computes: how much that is differs from batch to batch.
    """
    data = [tensor for tensor in tensors if not tensor.requires_grad]
    masked = [(tensor, tensor.clone()) for tensor in data if is_mask(tensor) or ignores_labels(tensor)]
    versions = [tensor._version for tensor, _ in masked]
    for tensor, _ in masked:
        tensor.masked_fill_(tensor == IGNORE_INDEX, 0) if ignores_labels(tensor) else tensor.fill_(1)
    try:
        yield
    finally:
        for tensor, content in masked:
            tensor.copy_(content)
        set_version_counters([tensor for tensor, _ in masked], versions)


def loop_frames() -> Iterator[FrameType]:
    """The frames of this thread that are neither PyTorch's nor ours, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(folder) for folder in _NOT_THE_LOOPS):
            yield frame
        frame = frame.f_back


def forget_locals(frame: FrameType) -> None:
    """Let go of the variables that a look at a frame's locals has left on it: before Python 3.13 they stay alive."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy, in a function


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that steps parameters of a model. Raises `ModelError` if none was made."""
    trained = {id(parameter) for parameter in model.parameters()}
    for thing in gc.get_objects():
        # Not `isinstance`, which asks the objects themselves for their class, and some of them answer with a warning.
        if issubclass(type(thing), torch.optim.Optimizer) and any(
            id(parameter) in trained for group in thing.param_groups for parameter in group["params"]
        ):
            return thing
    raise ModelError(f"{type(model).__name__} is called for training, but no optimizer holds its parameters")


def without_states(tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that are none of the optimizer's states: those a dry run makes itself.

    A checkpoint that a loop holds on to is one with them: `load_state_dict` copies nothing that has the right dtype
    and device.
    """
    states = {state.untyped_storage()._cdata for state in state_tensors(optimizer)}
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in states]


def _is_part(module: nn.Module, model: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _played(value: Any) -> Any:
    """CUDA's autocast as the dry run has it, which lets CPU tensors play CUDA."""
    if isinstance(value, torch.autocast) and value.device == "cuda":
        return torch.autocast("cpu", dtype=value.fast_dtype, enabled=value._enabled)
    return value
