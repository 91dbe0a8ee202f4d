"""PyTorch's compiler: its switches, and when it is loaded."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tightfit.runtime.internals.dispatcher import active_modes
from tightfit.runtime.internals.kernels import replaced

SIGNATURES = 1000  # the most shapes, and constants such as a layer's number, for which one code object is compiled


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs as it is written, with all that it calls: within compiled code, and after a break in it.

    A process that has not loaded dynamo, which takes seconds, does not load it for this.
    """
    as_written = _disable_dynamo(function)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A caller that dynamo has given up on runs as eager code, and dynamo begins again in what that calls.
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return as_written(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def compiled_code_off() -> Callable[[], None]:
    """Run compiled functions as eager code until the returned function is called. Does nothing without dynamo."""
    if getattr(sys.modules.get("torch._dynamo"), "__file__", None) is None:  # loading it takes seconds
        return lambda: None
    stance = torch.compiler.set_stance("force_eager")
    return partial(stance.__exit__, None, None, None)


@contextmanager
def compiled_code_on() -> Iterator[None]:
    """A context in which compiled functions run compiled, although `compiled_code_off` or a user's stance says no."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or getattr(getattr(frames, "_stance", None), "stance", "default") == "default":
        yield
        return
    with torch.compiler.set_stance("default"):
        yield


def notice_compiled_calls() -> None:
    """From now on, run functions that `torch.compile` made as eager code under our dispatch modes, and tell a mode that
    has a method `meets_compiled` of each call.

    PyTorch compiles nothing under a dispatch mode either, but never tries that function again, and would compile the
    mode's own code, which runs within the call. Does nothing without dynamo, or if done already.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    ask = getattr(frames, "_callback_from_stance", None)  # private: where it is gone, PyTorch does as it did
    if ask is None or hasattr(ask, "_of_tightfit"):
        return

    def callback_from_stance(callback: Any) -> Any:
        if callback in (None, False) or not torch._C._len_torch_dispatch_stack():
            return ask(callback)
        modes = [mode for mode in active_modes() if type(mode).__module__.startswith("tightfit.")]
        if not modes:
            return ask(callback)
        meets = next(filter(None, (getattr(mode, "meets_compiled", None) for mode in modes)), None)
        if meets is not None:
            meets(sys._getframe(1).f_locals.get("fn"))
        _met.is_eager = True
        return None

    def set_count(count: int) -> int:
        before = count_with(count)
        if count == 0:  # such a call begins
            _met.is_eager = False
        return 1 if count < 0 and _met.is_eager else before  # it ends, and raises if it has compiled nothing

    count_with: Any = getattr(frames, "set_fullgraph_compiled_frame_count", None)  # since PyTorch 2.13, for `fullgraph`
    if count_with is not None:
        frames.set_fullgraph_compiled_frame_count = set_count
    callback_from_stance._of_tightfit = True  # pyright: ignore[reportFunctionMemberAccess]
    frames._callback_from_stance = callback_from_stance


class _Met(threading.local):
    """The last call of compiled code in each thread: it ran as eager code, or not."""

    is_eager = False


_met = _Met()


def calls_of_compiled_functions() -> int:
    """How many functions that `torch.compile` made are running in this thread."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        code = frame.f_code  # not that of `torch.compiler.disable`, which has no callback
        count += "callback" in code.co_freevars and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"
        frame = frame.f_back
    return count


def compiled_function_in(module: nn.Module) -> str | None:
    """The name of a function of `torch.compile` or `torch.jit` that a module's own code names or holds, if any."""
    kinds = {type(part) for part in module.modules()}
    own = [value for kind in kinds for base in kind.__mro__ for value in vars(base).values()]
    waiting = [*own, *module.modules(), *(value for part in module.modules() for value in vars(part).values())]
    seen: set[int] = set()
    while waiting:
        found = getattr(waiting[-1], "__func__", waiting[-1])  # of methods, and of static and class methods
        waiting.pop()
        if not callable(found) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            return getattr(found, "name", None) or type(found).__name__
        under = vars(found) if hasattr(found, "__dict__") else {}
        if "_torchdynamo_orig_callable" in under and not under.get("_torchdynamo_disable"):
            return getattr(found, "__qualname__", type(found).__name__)
        if isinstance(found, FunctionType) and not (found.__module__ or "").startswith(("torch.", "tightfit.")):
            around = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
            waiting += [found.__globals__[name] for name in found.__code__.co_names if name in found.__globals__]
            waiting += [cell.cell_contents for cell in around.values() if not _is_empty(cell)]
    return None


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell  # raises for one that is not assigned yet
    except ValueError:
        return True


def compiler_is_loaded() -> bool:
    """True if dynamo and inductor are imported."""
    return "torch._inductor.compile_fx" in sys.modules


def load_compiler() -> None:
    """Import dynamo and inductor, which takes two seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch warns of itself
        import torch._dynamo.backends.common
        import torch._functorch.partitioners
        import torch._inductor.codegen.cpp
        import torch._inductor.compile_fx
        import torch._inductor.decomposition  # noqa: F401


def cancel_waiting_kernels() -> None:
    """Let inductor compile no kernel that it has not begun. Only for the end of a process: inductor remembers what was
    cancelled as being compiled, and would fail where it is needed again.
    """
    compiling = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    if compiling is not None and compiling.pool.cache_info().currsize:  # else the pool would be made here
        pool = compiling.pool()
        compiling.pool.cache_clear()
        pool.shutdown(wait=False, cancel_futures=True)


def compiler_is_disabled() -> bool:
    """True if `torch.compile` returns functions as they are (`TORCHDYNAMO_DISABLE`)."""
    from torch._dynamo import config  # takes seconds to import

    return bool(config.disable)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context in which PyTorch's interpreters of graphs make no progress bars, which nobody sees.

    The first one starts a thread that stays, and a process with threads cannot be forked.
    """
    from torch.fx import interpreter

    with replaced(interpreter, "tqdm", _NoBar):
        yield


class _NoBar:
    """Stands for a progress bar."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def update(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass


def many_compilations() -> AbstractContextManager[Any]:
    """A context in which a block may be compiled for up to `SIGNATURES` signatures (PyTorch's default is 8)."""
    from torch._dynamo import config  # takes seconds to import

    return config.patch(recompile_limit=SIGNATURES, accumulated_recompile_limit=SIGNATURES)
