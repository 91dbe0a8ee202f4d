"""Recompute by hand: on a card, blocks run as captured programs that keep nothing, where they can be captured."""

import sys
from typing import Any

import torch
from torch import nn

from tightfit.levers.captured.lever import CapturedForward, Group, shared_parameters
from tightfit.levers.handle import Applied
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.levers.recompute import recompute as recompute_recorded
from tightfit.levers.recompute.lever import install, matching_modules
from tightfit.levers.recompute.region import RecordedForward
from tightfit.runtime.internals import autocast_is_active, ignore_questions_for_gradients, without_dynamo
from tightfit.runtime.module_paths import module_at
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.simulation import simulation


def recompute(
    model: nn.Module, pattern: str, *, segments: int | None = None, use_reentrant: bool = False, captured: bool = True
) -> Applied:
    """Recompute the activations of every module whose path matches a glob.

    On a card the host launches kernels, and blocks run as programs that were recorded once (`tightfit.capture`), with
    less of the host's time than PyTorch's checkpoint takes. A block that cannot be recorded, and every block on a CPU,
    where kernels take the time, runs under an executor that notes its operators. Both give the bits of plain training.

    Args:
        pattern: A glob over module paths, in which `*` matches one part of the path: `"layers.*"` matches whole blocks,
            `"layers.*.mlp"` one part of each.
        segments: Joins the n matching modules, in order, to so many runs of neighbours, and holds only the inputs of
            each run.
        use_reentrant: Use PyTorch's reentrant checkpoint, which cannot give gradients to tensors that a block stores on
            its module.
        captured: False: no captured programs, which give no gradients of gradients.

    Returns:
        A handle whose `undo()` restores the model exactly.

    Raises:
        LeverError: Nothing matches, a match is already recomputed, or `segments` is out of range.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> x = torch.randn(64, 8)
        >>> plain = torch.autograd.grad(model(x).sum(), model[0][0].weight)[0]
        >>> with tightfit.recompute(model, "*"):
        ...     frugal = torch.autograd.grad(model(x).sum(), model[0][0].weight)[0]
        >>> torch.equal(plain, frugal)
        True
    """
    if not captured or segments is not None or use_reentrant:
        return recompute_recorded(model, pattern, segments=segments, use_reentrant=use_reentrant)
    handle = recompute_recorded(model, pattern)
    handle.undo()  # it has checked what was asked
    paths = matching_modules(model, pattern)
    shared = shared_parameters(model, [module_at(model, path) for path in paths])
    ignore_questions_for_gradients()
    group = Group(quiet=True)
    return install(RecomputedForward(module_at(model, path), path, group, shared) for path in paths)


class RecomputedForward(RecordedForward):
    """Recomputes a block: as a captured program on a card, by the recorder elsewhere."""

    def __init__(self, module: nn.Module, path: str, group: Group, shared: set[nn.Parameter]):
        super().__init__(module, path, RECOMPUTE_ALL)
        shares = not shared.isdisjoint(module.parameters())
        self.program = CapturedForward(module, path, RECOMPUTE_ALL, group, shares=shares)
        self.is_plain: bool | None = None  # its weights are ordinary tensors, which nobody gathers or unpacks
        self.waiting = 0  # calls under autocast whose backward has not begun
        self.is_alone: bool | None = None  # under autocast: whether each call's backward came before the next call

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "waiting": 0}

    @without_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps_aside or self.previous is not None or not is_on_card((args, kwargs)):
            return super().__call__(*args, **kwargs)
        if self.is_plain is None:
            self.is_plain = has_plain_weights(self.module)
        if not self.is_plain:
            return super().__call__(*args, **kwargs)
        if not autocast_is_active() or self._is_known_to_be_alone:
            return self.program(*args, **kwargs)
        return self._watched(args, kwargs)

    @property
    def _is_known_to_be_alone(self) -> bool:
        """True if no two calls share casts. A dry run leaves nothing on this object: it says so in `simulation`."""
        if self.is_alone is None and simulation.is_dry and not simulation.is_first_step:
            return self.number not in simulation.sharing_casts
        return bool(self.is_alone)

    @property
    def begins_otherwise(self) -> bool:
        return self.previous is None and self.is_alone is None

    def _watched(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call under autocast by the recorder, which shows whether the next call comes before its backward.

        Autocast casts a weight once for both then, and adds their gradients in 16 bits. A program casts for itself.
        """
        self.is_alone = False if self.waiting or self.is_alone is False else None
        if self.is_alone is False and simulation.is_dry:
            simulation.sharing_casts |= {self.number}
        outputs = super().__call__(*args, **kwargs)
        made = next((tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None), None)
        if self.is_alone is None and made is not None:
            self.waiting += 1
            made.register_hook(self._reached)
        return outputs

    def _reached(self, gradient: torch.Tensor) -> None:
        self.waiting -= 1
        if self.is_alone is None:
            self.is_alone = True

    _reached.only_waits = True  # pyright: ignore[reportFunctionMemberAccess] (see `looks_at_no_gradient`)


def has_plain_weights(block: nn.Module) -> bool:
    """True if a block's weights are neither divided over ranks (FSDP2, DTensor) nor quantised."""
    weights = (*block.parameters(), *block.buffers())
    if any(type(weight.data) is not torch.Tensor for weight in weights):
        return False
    if any(type(weight) not in (torch.Tensor, nn.Parameter) for weight in weights):
        return False
    sharded = sys.modules.get("torch.distributed.fsdp")
    return sharded is None or not any(isinstance(module, sharded.FSDPModule) for module in block.modules())


def is_on_card(arguments: Any) -> bool:
    """True if a block's arguments are on a card, or a dry run simulates one."""
    return simulation.of_cuda or any(tensor.is_cuda for tensor in tensors_in(arguments))
