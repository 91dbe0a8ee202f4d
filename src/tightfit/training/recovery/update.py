"""An optimizer's step that ran out of memory, finished bit for bit.

An optimizer writes parameter by parameter, or list by list, and each write changes what the next one would read: a
second `optimizer.step()` after half a step is another training. To undo the half would take a copy of all weights and
states before every step. It is finished instead. Before a step, the count of writes of each weight, gradient and state
is noted, which copies nothing. After a failure the counts say how often each tensor was written. The step then runs
again under a dispatch mode, one parameter at a time (which needs least memory and computes the same bits). The mode
skips as many writes to each tensor as were made, and runs all others. A write that would be computed from a tensor
that is ahead, because a later write of it was made already, is refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tightfit.errors import RecoveryError
from tightfit.optim import BF16AdamW, FlashAdamW, Muon8bit, MuonWithAdamW, OffloadedAdamW
from tightfit.optim.in_backward import has_stepped, only, steps_in_backward
from tightfit.optim.offloaded import MASTER
from tightfit.runtime.operators import flat, instances, traits_of, written_arguments
from tightfit.training.recovery.catching import TRIES, Failure, caught

FINISHED = (  # after the words of the failure
    " in the optimizer's step; it goes on where it stopped, one parameter at a time from now on: the same bits with "
    "less memory"
)
# Optimizers whose step is a function of weight, gradient and state, parameter by parameter, in operators that
# PyTorch sees. bitsandbytes writes through addresses, and torchao through compiled kernels.
FINISHABLE = (
    torch.optim.Adafactor,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Muon,
    torch.optim.SGD,
    BF16AdamW,
    FlashAdamW,
    MuonWithAdamW,
    Muon8bit,
)
# They put a state that they make in its place after the update: if it is there, the parameter is finished, and if it is
# not, it is made again from the same gradient.
_LATE_STATES = (torch.optim.SGD,)
_ITEM = torch.ops.aten._local_scalar_dense.default
_FRESH = torch.ops.aten.lift_fresh.default  # what `torch.tensor` returns: a view in name, of new memory


class UpdateGuard:
    """Mutable: how far one `optimizer.step()` has come. Made before it; for a step in backward, before forward."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # In lists: a tensor's hash is computed in Python, and this is done before every step.
        self._states = [(parameter, state.copy()) for parameter, state in optimizer.state.items()]
        self._noted = self._tensors()
        self._versions = [tensor._version for tensor in self._noted]
        self._counted = _WritesCounted() if _has_kernels_for_lists(optimizer) else None
        self._finishing: _Finishing | None = None

    def run(self, step: Callable[[], Any]) -> Any:
        """`step()`, which calls the optimizer's."""
        if self._counted is None:
            return step()
        with self._counted:
            return step()

    @property
    def has_written(self) -> bool:
        """True if a weight or a state may have been changed."""
        return has_stepped(self.optimizer) or self._finishing is not None or any(self._writes().values())

    def check(self) -> None:
        """Raise `RecoveryError` if the step cannot be finished after a failure in it."""
        kind = type(self.optimizer).__name__
        if steps_in_backward(self.optimizer):
            if self.has_written:
                raise _refusal(kind, "steps inside backward, and has changed weights before backward ended")
        elif type(self.optimizer) not in FINISHABLE and not (
            isinstance(self.optimizer, OffloadedAdamW) and not self.has_written
        ):
            raise _refusal(kind, "may have changed weights or states, and only PyTorch's own optimizers say which")

    def forget_unused_states(self) -> None:
        """Remove states that were made for parameters that were not updated: a half-made state is taken for a whole
        one.
        """
        writes = self._writes()
        finished = set() if self._finishing is None else self._finishing.finished
        for parameter in list(self.optimizer.state):
            state, known = self.optimizer.state[parameter], self._known.get(parameter)
            new = [t for t in _tensors_of(state) if known is None or all(t is not k for k in known.values())]
            is_updated = any(writes.get(_key(tensor)) for tensor in (parameter, *_tensors_of(state)))
            if is_updated and new and type(self.optimizer) in _LATE_STATES:
                finished.add(parameter)
            if is_updated or parameter in finished:
                continue
            for tensor in new:
                writes.pop(_key(tensor), None)  # its memory may be another tensor's next
            if known is None:
                del self.optimizer.state[parameter]
            else:
                state.clear()
                state.update(known)

    def finish(self, step: Callable[[], Any]) -> None:
        """Run the rest of the step; `step()` is the optimizer's own step. After another failure it can be called again.

        Raises `RecoveryError` where what is left to do cannot be computed any more.
        """
        self.check()
        if self._finishing is None:
            self._finishing = _Finishing(type(self.optimizer).__name__, self._writes())
        self.forget_unused_states()
        one_by_one(self.optimizer, step, self._finishing)

    @property
    def writes_made(self) -> int:
        """How many writes have been made: another try that makes none more is in vain."""
        return sum(self._writes().values())

    @cached_property
    def _known(self) -> dict[Tensor, dict[str, Any]]:
        """The states before the step."""
        return dict(self._states)

    def _tensors(self) -> list[Tensor]:
        """Weights, gradients and states."""
        gradients = [gradient for p in self._parameters if type(gradient := p.grad) is Tensor]
        states = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
        copies = self.optimizer.host_weights.values() if isinstance(self.optimizer, OffloadedAdamW) else ()
        return [*self._parameters, *gradients, *states, *copies]

    def _writes(self) -> dict[int, int]:
        """How often each tensor's memory has been written since."""
        if self._finishing is not None:
            return self._finishing.made
        if self._counted is not None:
            return {_key(tensor): self._counted.made.get(_key(tensor), 0) for tensor in self._tensors()}
        noted = zip(self._noted, self._versions, strict=True)
        made = {_key(tensor): tensor._version - before for tensor, before in noted}
        for parameter, state in self.optimizer.state.items():  # what was made since begins at zero writes
            known = self._known.get(parameter, {})
            new = {name: value for name, value in state.items() if name not in known and name != MASTER}
            for tensor in _tensors_of(new):
                made[_key(tensor)] = tensor._version
        return made


def one_by_one(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], finishing: "_Finishing | None" = None
) -> None:
    """The optimizer's step, one parameter at a time: the temporary tensors of one are there at once, not of all.

    The weights and the states are bit-equal to those of one step for all, as in `step_in_backward`.
    """
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
        if finishing is not None and parameter in finishing.finished:
            continue
        with only(optimizer, parameter), nullcontext() if finishing is None else finishing.of(optimizer, parameter):
            step()


def carry_out(
    guard: UpdateGuard,
    update: Callable[[Callable[[Callable[[], Any]], Any]], Any],
    device: torch.device,
    *,
    single: bool,
    failed: Callable[[Failure], None],
) -> None:
    """An update from its beginning to its end, however often memory runs out in it.

    `update(run)` does what belongs to it, and calls `run(step)` with the optimizer's step; `single` runs that one
    parameter at a time from the start. `failed` is told of each failure. Raises `RecoveryError` where the rest cannot
    be computed, or finds no memory either.
    """
    optimizer = guard.optimizer
    first = (lambda step: guard.run(partial(one_by_one, optimizer, step))) if single else guard.run
    failure = caught(lambda: update(first), device)
    in_vain = 0
    while failure is not None:
        guard.check()
        failed(failure)
        made = guard.writes_made
        failure = caught(lambda: update(guard.finish), device)
        in_vain = in_vain + 1 if guard.writes_made == made else 0
        if failure is not None and in_vain == TRIES:
            raise RecoveryError(
                f"{failure} in the step of {type(optimizer).__name__}, one parameter at a time too; the weights in "
                "memory are half updated and are not kept: resume from the newest checkpoint with a smaller batch, or "
                "take an optimizer with less state"
            )


class _WritesCounted(TorchDispatchMode):
    """Counts how often the memory of each tensor is written, where PyTorch's own counts do not say it: kernels that
    take lists of tensors (`_foreach_add_`, `_fused_adamw_`) do not move them. They are few calls for many tensors.
    """

    def __init__(self):
        super().__init__()
        self.made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        traits = traits_of(func)
        results = func(*args, **(kwargs or {}))
        if traits.written:
            for tensor in instances(Tensor, written_arguments(traits, args, kwargs or {})):
                self.made[_key(tensor)] = self.made.get(_key(tensor), 0) + 1
        elif not traits.is_view or func is _FRESH:
            for tensor in instances(Tensor, flat(results)):  # whatever had its memory before is gone
                self.made.pop(_key(tensor), None)
        return results


class _Finishing(TorchDispatchMode):
    """Skips writes that were made already. Mutable: `made` counts all of them, `seen` those that came by again."""

    def __init__(self, optimizer: str, made: dict[int, int]):
        super().__init__()
        self.made = made
        self.finished: set[Tensor] = set()
        self._optimizer = optimizer
        self._seen: dict[int, int] = {}
        self._others: dict[int, int] = {}  # writes to what is not noted yet: states that this very step makes
        self._held: list[Tensor] = []  # these, so that no other tensor has their memory meanwhile
        self._wrong: dict[int, Tensor] = {}  # results that were computed from what is ahead, held so that they stay
        self._is_astray = False  # a number was read from such a result: what follows may hang on it

    @contextmanager
    def of(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[None]:
        """Inside, the step of one parameter is finished."""
        self._is_astray = False
        self._seen.clear()
        try:
            with self:
                yield
            if any(_key(tensor) in self._wrong for tensor in _tensors_of(optimizer.state.get(parameter, {}))):
                raise _refusal(self._optimizer, "made a state of what cannot be computed any more")
            self.finished.add(parameter)
        finally:
            for tensor in _tensors_of(optimizer.state.get(parameter, {})):
                self.made.setdefault(_key(tensor), self._others.get(_key(tensor), 0))
            self._others.clear()
            self._held.clear()
            self._wrong.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        written = list(instances(Tensor, written_arguments(traits, args, kwargs)))
        states = [t for t in written if _key(t) in self.made]
        read = list(instances(Tensor, (*args, *kwargs.values())))
        if states:
            ahead = [self._is_ahead(t) for t in states]
            if all(ahead):
                for tensor in states:
                    self._note(tensor)
                return _as_returned(func, args, kwargs, traits.written)
            if any(ahead) or self._is_astray or any(self._is_wrong(t) for t in read):
                raise _refusal(self._optimizer, f"stopped where the rest cannot be computed ({traits.name})")
        results = func(*args, **kwargs)
        for tensor in written:
            self._count(tensor)
        if not traits.is_view and any(self._is_wrong(t) for t in read):
            self._is_astray = self._is_astray or func is _ITEM
            self._wrong.update({_key(t): t for t in [*instances(Tensor, flat(results)), *written]})
        return results

    def _note(self, tensor: Tensor) -> None:
        self._seen[_key(tensor)] = self._seen.get(_key(tensor), 0) + 1

    def _count(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self.made:
            self._note(tensor)
            self.made[key] += 1
        else:
            self._others[key] = self._others.get(key, 0) + 1
            self._held.append(tensor)

    def _is_ahead(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        return self._seen.get(key, 0) < self.made.get(key, 0)

    def _is_wrong(self, tensor: Tensor) -> bool:
        return self._is_ahead(tensor) or _key(tensor) in self._wrong


def _as_returned(func: Any, args: tuple, kwargs: dict, written: tuple[tuple[int, str], ...]) -> Any:
    """The result that a skipped call would return: the arguments that it writes into."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in written]
    count = len(func._schema.returns)
    if count == 0:
        return None
    return values[0] if count == 1 else tuple(values[:count])


def _tensors_of(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _key(tensor: Tensor) -> int:
    """The memory behind a tensor, which its views share."""
    if is_traceable_wrapper_subclass(tensor):
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _has_kernels_for_lists(optimizer: torch.optim.Optimizer) -> bool:
    """True if the step may use them: where they are asked for, and on every device but the CPU by default."""
    groups = optimizer.param_groups
    return any(g.get("fused") or g.get("foreach") or any(p.device.type != "cpu" for p in g["params"]) for g in groups)


def _refusal(optimizer: str, why: str) -> RecoveryError:
    return RecoveryError(
        f"out of memory inside the optimizer's step, which can be neither undone nor finished: {optimizer} {why}; the "
        "weights in memory are half updated and are not kept: resume from the newest checkpoint, with a smaller "
        "memory.budget or a smaller batch"
    )
