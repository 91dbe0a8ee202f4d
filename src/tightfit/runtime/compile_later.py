"""Lets packages mark functions for the compiler without importing it."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch


@contextmanager
def compiled_when_called() -> Iterator[None]:
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
