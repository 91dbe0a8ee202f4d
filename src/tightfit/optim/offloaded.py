"""AdamW with all states, or a share of them, in host memory, where they are updated.

The gradient of an offloaded parameter moves to the host when backward has made it (`HostGradient`), in parallel with
the rest of backward. The step runs on the host, parameter by parameter. Each weight is copied back to the device while
the next one is computed. On a CPU the same happens without streams. There it costs a copy of the weights and saves
nothing. Of weights that are streamed from a file, gradients and states are in that file too.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightfit.errors import InputError
from tightfit.memory.allocator import rest
from tightfit.optim.adamw_step import adamw_step, new_moments
from tightfit.optim.base import FrugalOptimizer
from tightfit.optim.host_gradient import HostGradient
from tightfit.optim.link import HOST, Link, file_of, is_streamed
from tightfit.runtime.simulation import host_memory, simulation

MASTER = "master"
_STATES = "optimizer states"
_LOW = (torch.bfloat16, torch.float16)


class _Version(NamedTuple):
    """A weight's address and its count of in-place writes. If both are unchanged, the weight was not written.

    A streamed weight has no address of its own: its lever moves it.
    """

    address: int
    writes: int

    @classmethod
    def of(cls, weight: Tensor) -> "_Version":
        return cls(0 if is_streamed(weight) else weight.data_ptr(), weight._version)


class OffloadedAdamW(FrugalOptimizer):
    """AdamW with a share of its states on the host. It is bit-equal to `torch.optim.AdamW` on the device that computes.

    16-bit weights get an fp32 master, on the host if the states are there. Gradients of offloaded parameters are
    `HostGradient`s; clipping, scaling and accumulation work on them as usual. The optimizer notices if a weight is
    changed in place, or replaced, between steps. It does not notice writes through `.data`.

    Args:
        params: Parameters or groups, as for `torch.optim.AdamW`, like `lr`, `betas`, `eps` and `weight_decay`.
        fraction: The least share of the states on the host, by bytes and in whole parameters: those of the parameters
            whose gradients come first in backward.
        fused: Use PyTorch's fused kernel on the host, which passes over its memory once. PyTorch's operators, one by
            one, pass over it three times. The kernel is bit-equal to `AdamW(fused=True)`.

    Raises:
        InputError: A setting is out of range.

    Example:
        >>> import torch
        >>> from tightfit.optim import OffloadedAdamW
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, fraction=0.5)
        >>> before = model.weight.clone()
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(model.weight, before)
        False
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fraction: float = 1.0,
        fused: bool = False,
    ):
        self.prepare(fraction=fraction, fused=fused)
        super().__init__(params, lr, betas, eps, weight_decay)

    def prepare(self, *, fraction: float, fused: bool) -> None:
        if not 0 <= fraction <= 1:
            raise InputError(f"fraction is {fraction!r}: the share of the states on the host goes from 0 to 1")
        self.fraction, self.fused = fraction, fused
        self._offloaded: set[Tensor] = set()
        self._links: dict[torch.device, Link] = {}
        self._copies: dict[Tensor, Tensor] = {}  # fp32 weights on the host
        self._written: dict[Tensor, _Version] = {}  # the versions of weights after the last step
        self._sent: dict[Tensor, Any] = {}  # events of copies to the device that may still run
        self._hooks: list[Any] = []
        self._is_dry = simulation.is_dry
        weakref.finalize(self, _remove, self._hooks)

    def own_settings(self) -> dict[str, Any]:
        return {"fraction": self.fraction, "fused": self.fused}

    def adopt(self, parameters: Sequence[Tensor], choice: Any = None) -> None:
        chosen = chosen_for_host(parameters, self.fraction) if choice is None else choice
        self._offloaded.update(chosen)
        owner = weakref.ref(self)
        for parameter in chosen:
            self._link(parameter)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_gradient_ready, owner)))

    def choice(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p in self._offloaded]

    @property
    def host_weights(self) -> Mapping[Tensor, Tensor]:
        """The weights' copies on the host that are not states: those of parameters that are not 16-bit."""
        return self._copies

    @property
    def host_weights_bytes(self) -> int:
        """Bytes that `host_weights` take once all parameters have been updated."""
        return sum(p.nbytes for p in self._offloaded if p.dtype not in _LOW and file_of(p) is None)

    def state_device(self, parameter: Tensor, key: str) -> torch.device:
        return HOST if parameter in self._offloaded else parameter.device

    def empty_state(self, parameter: Tensor, key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        in_file = self._in_file(parameter, dtype)
        if in_file is not None and tuple(shape) == tuple(parameter.shape):
            return in_file()
        if key == MASTER and parameter in self._offloaded:
            return self._empty_on_host(parameter, dtype)
        return super().empty_state(parameter, key, shape, dtype)

    def states_were_read(self) -> None:
        """The masters agree with the weights: what was read is no change by somebody else."""
        for parameter, state in self.state.items():
            if MASTER in state:
                self._written[parameter] = _Version.of(parameter)

    def _taken(self, parameter: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
            return super()._taken(parameter, key, value)
        in_file = self._in_file(parameter, value.dtype)
        if in_file is None:
            return super()._taken(parameter, key, value)
        taken = in_file()
        taken.data.copy_(value)
        rest(taken)
        return taken

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._copies.clear()
        self._written.clear()

    def update(self) -> None:
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for parameter in with_gradient:  # where the file has no room for a state, no weight is updated
                if parameter in self._offloaded and file_of(parameter) is not None and not self.state[parameter]:
                    self._weight(parameter)
            self._step_on_device([p for p in with_gradient if p not in self._offloaded], group)
            for parameter in with_gradient:
                if parameter in self._offloaded:
                    with host_memory():
                        self._step_on_host(parameter, group)
        for link in self._links.values():
            link.join()

    # Gradients

    def take(self, parameter: Tensor) -> None:
        """Move a gradient that backward has just computed to the host."""
        gradient = parameter.grad
        if simulation.is_dry == self._is_dry and gradient is not None and not isinstance(gradient, HostGradient):
            place = file_of(parameter)
            target = None if place is None else place.empty(gradient, gradient.dtype, "gradients")
            parameter.grad = HostGradient(gradient, self._link(parameter), target)

    def _link(self, parameter: Tensor) -> Link:
        return self._links.setdefault(parameter.device, Link(parameter.device))

    # The step

    def _step_on_device(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        weights = [self._weight(p) for p in parameters]
        gradients = [g.to(w.dtype) for p, w in zip(parameters, weights, strict=True) if (g := p.grad) is not None]
        if weights:
            adamw_step(weights, gradients, [self.state[p] for p in parameters], group)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)
                self._written[parameter] = _Version.of(parameter)

    def _step_on_host(self, parameter: Tensor, group: dict[str, Any]) -> None:
        link = self._link(parameter)
        sent = self._sent.pop(parameter, None)
        if sent is not None:
            sent.synchronize()  # the last step's copy may still read the memory that this step writes
        weight = self._weight(parameter)
        arrived = self._gradient(parameter, link)
        gradient = arrived.to(weight.dtype)
        adamw_step([weight], [gradient], [self.state[parameter]], group, foreach=False, fused=self.fused)
        if is_streamed(parameter):
            if weight is not parameter:
                parameter.copy_(weight)  # most of them are on the host now
            self._written[parameter] = _Version.of(parameter)
            touched = [weight, *self.state[parameter].values()]
            for tensor in (parameter, arrived, *touched):
                rest(tensor)
            if file_of(parameter) is not None:  # the gradient is read, the states read and written, the weight written
                link.in_file(arrived, *touched, *touched, parameter)
            return
        outgoing = weight if weight.dtype == parameter.dtype else link.empty_on_host(parameter).copy_(weight)
        self._sent[parameter] = link.to_device(parameter, outgoing)
        self._written[parameter] = _Version.of(parameter)

    def _gradient(self, parameter: Tensor, link: Link) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None, "only parameters with a gradient are updated"
        if isinstance(gradient, HostGradient):
            return gradient.host()
        arriving = link.to_host(gradient)
        link.wait(arriving)
        return arriving

    def _weight(self, parameter: Tensor) -> Tensor:
        """The weight to update, in agreement with the parameter. Makes the states if there are none."""
        on_host, is_low = parameter in self._offloaded, parameter.dtype in _LOW
        state = self.state[parameter]
        weight = parameter
        place = file_of(parameter)
        if is_low or (on_host and (place is None or place.is_of_card)):
            kept: dict[Any, Tensor] = state if is_low else self._copies
            key = MASTER if is_low else parameter
            if key not in kept:
                kept[key] = self._master_of(parameter, on_host)
            elif self._written.get(parameter) != _Version.of(parameter):
                _follow(kept[key], parameter)
            weight = kept[key]
        if "exp_avg" not in state:
            state.update(new_moments(weight, self._in_file(parameter, weight.dtype)))
            for tensor in (parameter, weight, *state.values()):
                rest(tensor)
        return weight

    def _in_file(self, parameter: Tensor, dtype: torch.dtype) -> Callable[[], Tensor] | None:
        """Makes memory for a state in the parameter's file; None if that is in memory."""
        place = file_of(parameter) if parameter in self._offloaded else None
        return None if place is None else partial(place.empty, parameter, dtype, _STATES)

    def _master_of(self, parameter: Tensor, on_host: bool) -> Tensor:
        if not on_host:
            return parameter.detach().to(torch.float32, copy=True)
        dtype = torch.float32 if parameter.dtype in _LOW else parameter.dtype
        return self._empty_on_host(parameter, dtype).copy_(parameter.detach())

    def _empty_on_host(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory of a parameter's shape. It is pinned where a card's copies read it: not for streamed weights."""
        in_file = self._in_file(parameter, dtype)
        if in_file is not None:
            return in_file()
        return self._link(parameter).empty_on_host(parameter, dtype, pinned=not is_streamed(parameter))


def chosen_for_host(parameters: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Parameters with at least `fraction` of all elements: the last ones, without any that are not needed for that."""
    target = fraction * sum(p.numel() for p in parameters)
    chosen: list[Tensor] = []
    count = 0
    for parameter in reversed(parameters):
        if count >= target:
            break
        chosen.append(parameter)
        count += parameter.numel()
    for parameter in sorted(chosen, key=Tensor.numel, reverse=True):
        if count - parameter.numel() >= target:
            chosen = [p for p in chosen if p is not parameter]
            count -= parameter.numel()
    return chosen


def _gradient_ready(owner: Callable[[], "OffloadedAdamW | None"], parameter: Tensor) -> None:
    optimizer = owner()
    if optimizer is not None:
        optimizer.take(parameter)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _follow(weight: Tensor, parameter: Tensor) -> None:
    """Copy a parameter that was written into its wider weight, except where both still agree.

    There the weight keeps its precision.
    """
    theirs = parameter.detach().to(weight.device)
    weight.copy_(torch.where(weight.to(theirs.dtype) == theirs, weight, theirs.to(weight.dtype)))
