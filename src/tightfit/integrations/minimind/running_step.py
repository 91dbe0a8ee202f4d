"""Plans the step of a running loop, from inside the model's first call, before its forward begins."""

import contextlib
import copy
import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import tightfit
from tightfit.errors import ModelError
from tightfit.integrations.batches import ignores_labels, is_mask
from tightfit.integrations.minimind.step_source import LOSS, WrittenStep, find_step
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.optim.by_name import state_tensors
from tightfit.planner.levers import CompiledBlocks, allowed_levers
from tightfit.planner.request import Request, device_of_a_rank
from tightfit.ranks.world import World
from tightfit.runtime.internals import set_version_counters
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch
from tightfit.tracing.restore import everything_restored
from tightfit.tracing.surroundings import plain_tensors

_NOT_THE_LOOPS = (Path(torch.__file__).parent, Path(tightfit.__file__).parent, Path(contextlib.__file__))
_CLIPPED = 1.0  # an arbitrary norm for clipping: its value does not affect memory or time


class WrittenLoss:
    """The loop's own loss: runs its lines with its names.

    A name that the lines bind stays bound until the loop would bind it again or delete it. So logits in a variable are
    held while the optimizer steps, as in the loop itself. `called` is the model as the loop calls it, where that is not
    the planned one: a dry run puts its own in its place.
    """

    def __init__(self, step: WrittenStep, names: dict[str, Any], called: nn.Module | None = None):
        self.step = step
        self.of_model = [name for name, value in names.items() if called is not None and value is called]
        self.names = {name: copy.copy(v) if type(v) in (list, dict, set) else v for name, v in names.items()}
        self.given = frozenset(names)

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        for name in self.step.dropped - self.given:
            self.names.pop(name, None)
        self.names.update(dict.fromkeys(self.of_model, model))
        try:
            exec(self.step.code, self.names)
        except NameError as error:
            where = f"{self.step.file}:{self.step.line}"
            raise ModelError(f"{where}: the step's lines cannot run outside of their loop: {error}") from error
        loss = self.names.pop(LOSS, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise ModelError(f"{self.step.file}:{self.step.line}: the value before backward() is no scalar tensor")
        self.names.update(dict.fromkeys(self.of_model))  # a dry run's model is gone after it
        return loss


@contextmanager
def running_request(
    model: nn.Module,
    *,
    blocks: str | None = None,
    called: nn.Module | None = None,
    world: World | None = None,
    compiles: bool = False,
) -> Iterator[Request]:
    """A context with the planner's request for the running step, called inside the call of `model` on this thread.

    In DDP the loop calls `called`, which holds the model, in each rank of `world`. The loss is the lines of the loop
    from the model's call to `backward()`. The optimizer is the one with parameters of the model. Only bit-exact levers
    are allowed, and with `compiles` compiled blocks. Inside the context the loop's other models may run dry too, and no
    position of the batch is masked, so that the plan fits later batches of its shape. Afterwards everything is
    restored. Raises `ModelError` if the step cannot be found.
    """
    step = find_step(loop_frames())
    variables = {**step.frame.f_globals, **step.frame.f_locals}
    names = {name: variables[name] for name in step.reads if name in variables}
    here = next(model.parameters()).device
    device = device_of_a_rank(here, in_ranks=world is not None)
    called = None if called is model else called
    whole = model if called is None else called  # no truth is asked of a wrapper: it may ask the model for its length
    others = [m for m in names.values() if isinstance(m, nn.Module) and not _is_part(m, whole)]
    if device.kind != "cpu":
        names = {name: _played(value) for name, value in names.items()}
    batch = {name: value for name, value in names.items() if isinstance(value, torch.Tensor)}
    kept = [value for name, value in variables.items() if name not in step.binds]
    optimizer = optimizer_of(model)
    inside = without_states([tensor for tensor in tensors_in(kept) if tensor.device == here], optimizer)
    held = [tensor for other in others for tensor in (*other.parameters(), *other.buffers(), *plain_tensors(other))]
    request = Request.of(
        model,
        batch,
        loss=WrittenLoss(step, names, called),
        optimizer=optimizer,
        grad_clip=_CLIPPED if step.clips else None,
        device=here,
        compiles=compiles,
        blocks=blocks,
        micro_batches=step.micro_batches(),
        world=world,
        resident=tuple(inside + held),
    ).but(levers=allowed_levers(["exact", CompiledBlocks.name] if compiles else "exact"))  # ranks compile too
    with ExitStack() as stack:
        stack.enter_context(fullest([*batch.values()]))
        for other in others:
            stack.enter_context(everything_restored(other))
        if step.reenters:  # the lines enter autocast themselves, and a second one around them would cast more
            stack.enter_context(torch.autocast("cpu", enabled=False))
        elif device.kind != "cpu" and torch.is_autocast_enabled("cuda"):
            stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")))
        stack.callback(forget_locals, step.frame)
        yield request


@contextmanager
def fullest(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which masks (tensors of zeros and ones) are true everywhere and no label is ignored."""
    # A loop may drop masked positions before it computes, and their number differs between batches. A plan made from a
    # batch with few labels was 7% too low (MiniMind's distillation, notes).
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
    """The frames of this thread outside of PyTorch and this package, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(folder) for folder in _NOT_THE_LOOPS):
            yield frame
        frame = frame.f_back


def forget_locals(frame: FrameType) -> None:
    """Free the copy of its variables that reading `f_locals` leaves on a function's frame."""
    # Before Python 3.13 that copy lives as long as the frame, and with it tensors that the loop has deleted.
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        frame.f_locals.clear()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that steps parameters of a model. Raises `ModelError` if none was made."""
    trained = {id(parameter) for parameter in model.parameters()}
    for thing in gc.get_objects():
        # Not `isinstance`: that reads `__class__` of every object, and some objects raise a warning then.
        if issubclass(type(thing), torch.optim.Optimizer) and any(
            id(parameter) in trained for group in thing.param_groups for parameter in group["params"]
        ):
            return thing
    raise ModelError(f"{type(model).__name__} is called for training, but no optimizer holds its parameters")


def without_states(tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors without those that share memory with the optimizer's states, which a dry run makes itself."""
    # A checkpoint that a loop still holds shares memory with the states: `load_state_dict` does not copy a state that
    # has the right dtype and device. Both were once counted (notes/).
    states = {state.untyped_storage()._cdata for state in state_tensors(optimizer)}
    return [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in states]


def _is_part(module: nn.Module, model: nn.Module) -> bool:
    return any(part is module for part in model.modules())


def _played(value: Any) -> Any:
    """A value of the loop for a dry run. CUDA's autocast becomes the CPU's, whose tensors simulate CUDA's."""
    if isinstance(value, torch.autocast) and value.device == "cuda":
        return torch.autocast("cpu", dtype=value.fast_dtype, enabled=value._enabled)
    return value
