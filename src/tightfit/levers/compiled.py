"""Blocks compiled one by one: `compile_blocks(model, "layers.*")`.

Not the model is compiled but its blocks: parameters are arguments of the compiled code, so one compilation serves all
blocks of a kind. What a block holds for backward is then PyTorch's own choice, the smallest cut of its joint graph, and
recomputing is a share of that: no operator of compiled code passes the dispatcher, so neither our recompute nor a dry
run sees into it. Under a dry run, or where somebody else watches operators, a block runs as it was written.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError
from tightfit.internals import dispatch_is_watched, inductor_with_budget
from tightfit.levers.cpp_compiler import demand_compiler
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import install, matching_modules
from tightfit.levers.recompute.region import FrugalForward


def compile_blocks(model: nn.Module, pattern: str, *, keep: float = 1.0) -> Applied:
    """Compile every module whose path matches a glob (`"layers.*"`), each kind of them once, when they first run.

    Exact to rounding: fused kernels add in another order. `keep` is the share of what the compiled backward would like
    to find kept that is kept (PyTorch's `activation_memory_budget`): 1 for the fastest, 0 to recompute a block from its
    inputs. Without gradients the blocks run as they were written.

    Returns a handle whose `undo()` restores the model exactly. Raises `LeverError` where nothing matches, where `keep`
    is no share, or where another lever or package has replaced a block's forward, `DeviceError` where the CPU has no
    C++ compiler.
    """
    if not 0 <= keep <= 1:
        raise LeverError(f"keep={keep} is not a share: give a number from 0 to 1")
    paths = matching_modules(model, pattern)
    first = next(model.parameters(), None)
    if first is None or first.device.type == "cpu":
        demand_compiler("compile_blocks compiles blocks")
    for path in paths:
        replaced = model.get_submodule(path).__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, FrugalForward):
            raise LeverError(f"{path}: its forward was replaced on this instance, so it shares no code with its kind")
    return install(CompiledForward(model.get_submodule(path), path, keep) for path in paths)


class CompiledForward(FrugalForward):
    """Runs a block as the compiled code of its class."""

    does = "compiled"

    def __init__(self, module: nn.Module, path: str, keep: float):
        super().__init__(module, path)
        self.keep = keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or dispatch_is_watched():
            return self.original(*args, **kwargs)
        return compiled_forward(type(self.module), self.keep)(self.module, *args, **kwargs)


@functools.cache
def compiled_forward(kind: type[nn.Module], keep: float) -> Callable[..., Any]:
    """The `forward` of a class of modules, compiled with one share kept: a backend of its own, so that code compiled
    with another share is not taken.
    """
    return torch.compile(kind.forward, backend=functools.partial(inductor_with_budget, keep))
