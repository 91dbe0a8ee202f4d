"""Imports packages of others without what nobody asked for: PyTorch's compiler, and words about kernels of the CPU."""

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

# On a CPU with AVX-512 for bf16, this module of bitsandbytes warns that it could not get a faster kernel from a hub.
CPU_KERNELS, NO_KERNEL = "bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"


def light_import(name: str) -> ModuleType:
    """Import a package or module. Raises `ImportError` as the `import` statement does."""
    logger = logging.getLogger(CPU_KERNELS)
    logger.addFilter(_is_other_word)
    try:
        with _compiled_when_called():
            return importlib.import_module(name)
    finally:
        logger.removeFilter(_is_other_word)


def _is_other_word(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NO_KERNEL)


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """A context in which `torch.compile` of a function does its work when that function is first called.

    bitsandbytes marks two functions when it is imported, and peft imports bitsandbytes. PyTorch then imports the whole
    compiler, which takes two seconds, for functions that run on CPUs only.
    """
    compile_now: Any = torch.compile

    def compile_later(function: Any = None, **settings: Any) -> Any:
        if function is None:
            return lambda decorated: compile_later(decorated, **settings)
        if not isinstance(function, FunctionType):
            return compile_now(function, **settings)
        return _later(function, functools.partial(compile_now, function, **settings))

    torch.compile = compile_later  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.compile = compile_now


def _later(function: FunctionType, made: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(made())
        return compiled[0](*args, **kwargs)

    return call
