"""Runs a training script, unchanged, under the monitor."""

import gc
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tightfit.errors import InputError
from tightfit.runtime.outside import outside
from tightfit.training.monitoring.watch import TRACED_STEP, Monitor


@dataclass(frozen=True)
class ScriptRun:
    """The monitor of a script, and the exception that ended the script (`SystemExit` too), if any."""

    watch: Monitor
    error: BaseException | None


class PreparedScript(NamedTuple):
    """The findings of `prepare`: tensors to count besides the model, and whether it runs compiled code, which a trace
    would run as eager code, in other bytes.
    """

    resident: Iterable[torch.Tensor] = ()
    is_compiled: bool = False


def profile_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    traced_step: int | None = TRACED_STEP,
    prepare: Callable[[nn.Module], PreparedScript] | None = None,
) -> ScriptRun:
    """Run a script as `python SCRIPT ARGUMENTS` would, in this process, and monitor its training.

    The model is the first module with trained parameters that the script calls at top level with gradients enabled. The
    optimizers are those that step. `prepare(model)` is called inside the model's first call, before its forward.

    Raises `InputError` if there is no such script, or no Python in it. Exceptions of the script and of `prepare` are
    returned, of any kind.
    """
    if not script.is_file():
        raise InputError(f"{script}: no such script")
    with script.open("rb") as file:
        if b"\0" in file.read(1024):
            raise InputError(f"{script}: a program, and no Python script: give the script, without an interpreter")
    watch = Monitor(traced_step=traced_step)
    error: BaseException | None = None
    with _as_main(script, arguments), Discovery(watch, prepare):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except BaseException as raised:
            error = raised
    watch.stop(error)
    return ScriptRun(watch, error)


def from_script_on(error: BaseException, script: Path) -> BaseException:
    """The exception with its traceback cut to start in the script, as `python SCRIPT` would show it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return error if trace is None else error.with_traceback(trace)


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """A context with `sys.argv` and `sys.path` as the script expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


class Discovery:
    """Finds the model and the optimizers of a running script by PyTorch's global hooks, and adds them to a monitor."""

    def __init__(self, watch: Monitor, prepare: Callable[[nn.Module], PreparedScript] | None = None):
        self.watch = watch
        self.prepare = prepare
        self.depth = 0  # of module calls
        self.of_calls: list[Any] = []  # handles of hooks, until a model is found
        self.of_optimizers: list[Any] = []

    def __enter__(self) -> "Discovery":
        self.look()
        return self

    def look(self) -> None:
        """Look for a model, or for another one. Call it outside of all modules' calls."""
        if not self.of_calls:
            self.depth = 0
            self.of_calls = [
                register_module_forward_pre_hook(self._call_begins),
                register_module_forward_hook(self._call_ends, always_call=True),
            ]

    def __exit__(self, *exception: Any) -> None:
        for handles in (self.of_calls, self.of_optimizers):
            while handles:
                handles.pop().remove()

    def _call_begins(self, module: nn.Module, args: tuple) -> None:
        if outside.depth:
            return
        self.depth += 1
        if self.depth == 1 and torch.is_grad_enabled() and _is_trained(module):
            self._found(module, args)

    def _call_ends(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not outside.depth:
            self.depth -= 1

    def _found(self, model: nn.Module, args: tuple) -> None:
        """Start to monitor the model, inside its first call."""
        # Hooks registered now are not called for this call, so `enter_call` enters it.
        while self.of_calls:
            self.of_calls.pop().remove()
        if self.prepare is not None:
            prepared = self.prepare(model)
            self.watch.add_resident(prepared.resident)
            if prepared.is_compiled:
                self.watch.traced_step = 0
        if not self.of_optimizers:  # after `prepare`, whose dry runs step optimizers that are not the script's
            self.of_optimizers = [
                register_optimizer_step_pre_hook(self.watch.stage.optimizer_begins),
                register_optimizer_step_post_hook(self.watch.stage.optimizer_ends),
            ]
        self.watch.stage.has_optimizer = _has_optimizer()
        self.watch.add_model(model)
        self.watch.start()
        self.watch.enter_call(model, args)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _has_optimizer() -> bool:
    """True if the script has made an optimizer. One that is made later is found when it steps."""
    # Not `isinstance`: that reads `__class__` of every object, and some objects raise a warning then.
    return any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects())
