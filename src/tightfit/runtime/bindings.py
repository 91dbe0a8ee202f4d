"""PyTorch's own Python functions for ATen operators: they parse their arguments in half of the time."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.runtime.internals import no_modes
from tightfit.runtime.operators import map_instances, traits_of

_C: Any = torch._C
_found: dict[tuple, Callable[..., Any]] = {}  # by call: blocks repeat theirs, and so do the policies of a plan
_HOMES: tuple[Any, ...] = (_C._VariableFunctions, _C.TensorBase, _C._nn)


class Called(TorchDispatchMode):
    """Notes the operators that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def binding_of(operator: Any, node: Any) -> Callable[..., Any]:
    """A function that calls this operator with arguments like those of `node`, and nothing else."""
    plain = operator._op
    if operator.namespace != "aten" or traits_of(operator).is_random:
        return plain

    call = _call_of(operator, node.args, node.kwargs)
    found = _found.get(call)
    if found is None:
        args = map_instances(torch.fx.Node, _without_memory, node.args)
        kwargs = map_instances(torch.fx.Node, _without_memory, node.kwargs.values())
        found = _found[call] = _searched(operator, args, dict(zip(node.kwargs, kwargs, strict=True)))
    return found


def _call_of(operator: Any, args: Any, kwargs: Any) -> tuple:
    """A call as PyTorch's parser of arguments sees it, as a key."""

    def key(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, list | tuple):
            return tuple(map(key, value))
        return type(value), repr(value)

    return operator, key(args), tuple((name, key(value)) for name, value in kwargs.items())


def _without_memory(source: Any) -> Any:
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _searched(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
    plain = operator._op
    with no_modes(), torch.no_grad():
        # Sequences are tuples in the program.
        args = tuple(tuple(item) if isinstance(item, list) else item for item in args)
        expected = _calls(plain, args, kwargs)
        if expected is None:
            return plain
        for candidate in candidates(operator):
            if _calls(candidate, args, kwargs) == expected:
                return candidate
    return plain


def candidates(operator: Any) -> Iterator[Callable[..., Any]]:
    for home in _HOMES:
        found = getattr(home, operator._opname, None)
        if callable(found):
            yield found


def _calls(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The operators that a call of the function runs, in a form that can be compared. None if it fails."""
    try:
        with Called() as called:
            function(*args, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # it has no kernel for tensors without memory, or takes other arguments
    return [(func, _shown(args), _shown(tuple(kwargs.items()))) for func, args, kwargs in called.calls]


def _shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(map(_shown, value))
    return type(value), value
