"""Compiles the blocks of a model one by one: `compile_blocks(model, "layers.*")`.

Parameters are arguments of the compiled code, so one compilation serves all blocks of a kind. PyTorch decides which
tensors a compiled block saves for backward: the smallest cut of its joint graph, or a share of that. Our own recompute
does not apply, because no operator of compiled code passes the dispatcher. A dry run runs the code that the compiler
generates (`tracing/compiled_code.py`). A block runs as eager code if another dispatch mode is active.
"""

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tightfit.errors import CompileError, LeverError
from tightfit.levers.activity import simulators
from tightfit.levers.handle import Applied
from tightfit.levers.recompute.lever import install, matching_modules
from tightfit.levers.recompute.region import FrugalForward
from tightfit.runtime.compilers import demand_compiler, device_of
from tightfit.runtime.internals import (
    dispatch_is_watched,
    inductor_with_budget,
    many_compilations,
    tune_kernels_apart,
)
from tightfit.runtime.module_paths import module_at


def compile_blocks(model: nn.Module, pattern: str, *, keep: float = 1.0) -> Applied:
    """Compile every module whose path matches a glob. Each kind is compiled once, when it first runs.

    Results are exact to rounding: fused kernels add in another order. Without gradients the blocks run as eager code.

    Args:
        model: The module whose blocks are compiled.
        pattern: A glob over module paths, such as `"layers.*"`.
        keep: PyTorch's `activation_memory_budget`, from 1 (the fastest) to 0 (recompute a block from its inputs).

    Returns:
        A handle whose `undo()` restores the model exactly.

    Raises:
        LeverError: Nothing matches, `keep` is not between 0 and 1, or another lever or package has replaced a block's
            forward.
        DeviceError: The machine has no C++ compiler, or for a card no Triton.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> with tightfit.compile_blocks(model, "*", keep=0.5):  # compiled when they first run
        ...     blocks_run_as_compiled = all("forward" in vars(block) for block in model)
        >>> blocks_run_as_compiled, any("forward" in vars(block) for block in model)
        (True, False)
    """
    if not 0 <= keep <= 1:
        raise LeverError(f"keep={keep} is not a share: give a number from 0 to 1")
    return compile_paths(model, dict.fromkeys(matching_modules(model, pattern), keep), whole=False)


def compile_paths(model: nn.Module, shares: Mapping[str, float], *, whole: bool = True) -> Applied:
    """Compile the modules at these paths, each with its own `keep`.

    With `whole`, a module that compiles only in parts raises when it first runs.
    """
    if shares:
        demand_compiler("compile_blocks compiles blocks", device_of(model))
    for path in shares:
        replaced = module_at(model, path).__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, FrugalForward):
            raise LeverError(f"{path}: its forward was replaced on this instance, so it shares no code with its kind")
    return install(CompiledForward(module_at(model, path), path, keep, whole) for path, keep in shares.items())


class CompiledForward(FrugalForward):
    """Runs a block as the compiled code of its class."""

    does = "compiled"

    def __init__(self, module: nn.Module, path: str, keep: float, whole: bool = False):
        super().__init__(module, path)
        self.keep = keep
        self.whole = whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps_aside:
            return self.original(*args, **kwargs)
        if simulators.compiled is not None:
            with self.moving_no_state():
                return self.written(simulators.compiled, args, kwargs)
        if dispatch_is_watched():
            # dynamo leaves code alone under a dispatch mode. The mode would see eager operators or none at all.
            return self.original(*args, **kwargs)
        with self.moving_no_state(), many_compilations():
            return compiled_forward(type(self.module), self.keep, self.whole)(self.module, *args, **kwargs)

    def written(self, run: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The block in a dry run: the code that the compiler generates, or eager code if only parts would compile."""
        try:
            return run(self.module, self.keep, args, kwargs)
        except CompileError:
            if self.whole:
                raise
        # Outside of `except`: dynamo's exception holds the frames of the code that failed, and with them the block's
        # input, which would count in the dry run.
        return self.original(*args, **kwargs)


@functools.cache
def compiled_forward(kind: type[nn.Module], keep: float, whole: bool) -> Callable[..., Any]:
    """The compiled `forward` of a class of modules, for one value of `keep`."""
    tune_kernels_apart()
    backend = functools.partial(inductor_with_budget, kind.__name__, keep)
    return torch.compile(own_forward(kind, f"keep_{keep:g}"), backend=backend, fullgraph=whole)


def own_forward(kind: type[nn.Module], suffix: str) -> Callable[..., Any]:
    """A copy of a class's `forward` with a new code object. Raises `CompileError` if that is no Python function."""
    # dynamo caches compilations by code object. Subclasses share the code of an inherited `forward`, and each value of
    # `keep` needs a compilation of its own.
    forward = kind.forward
    if not isinstance(forward, FunctionType):
        raise CompileError(f"the forward of {kind.__name__} is no Python function, so it cannot be compiled")
    code = forward.__code__.replace(co_name=f"{kind.__name__}_{suffix}")
    twin = FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
    twin.__kwdefaults__ = forward.__kwdefaults__
    return twin
