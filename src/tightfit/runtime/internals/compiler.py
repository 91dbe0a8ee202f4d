"""PyTorch's compiler: its switches, and when it is loaded."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from tightfit.runtime.internals.kernels import replaced

SIGNATURES = 1000  # the most shapes, and constants such as a layer's number, for which one code object is compiled
without_dynamo = _disable_dynamo  # loads dynamo when the function is first called, not when it is defined


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
