"""Packages that take seconds to import, left out until something of them is really used.

A dry run asks nothing of PyTorch's compiler. But PyTorch's own meta kernels, its optimizers and `transformers` import
the compiler, sympy and packages for many devices all the same: to ask whether a size is symbolic (it never is here), to
mark a function for the compiler (which never comes), to name a class in a check. Inside `deferred` such an import gives
a stand-in. It answers what is asked about plain numbers, and is the real thing for all else, which is imported then.

Only for a process that answers one question and ends: what was marked for the compiler is not marked later.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

DYNAMO, SYMBOLS = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
PACKAGES = (
    DYNAMO,
    SYMBOLS,
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "sympy",
    "torchao",
    "accelerate",
)
MADE_LATER = "torch.distributed.tensor"  # transformers makes placements of its shards when it is imported
_PLAIN = (bool, int, float)


@contextmanager
def deferred(packages: Sequence[str] = PACKAGES) -> Iterator[None]:
    """Inside, importing one of these packages gives a stand-in, unless it is loaded already."""
    finder = _Finder([name for name in packages if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.forget()


class _Finder(importlib.abc.Loader):
    """Finds stand-ins for packages. Mutable: those that are out of the way, since something of them was used."""

    def __init__(self, packages: Sequence[str]):
        self.packages = list(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        mine = any(name == package or name.startswith(f"{package}.") for package in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_KNOWN.get(module.__name__, dict)())

    def forget(self) -> None:
        """Take all stand-ins out of the table of modules, so that a later import finds the real ones."""
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn) and module.__dict__["_finder"] is self:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                above = sys.modules.get(parent)
                if above is not None and above.__dict__.get(child) is module:
                    delattr(above, child)

    def real(self, module: str) -> ModuleType:
        """The real module, imported now; from here on nothing of its package is deferred, nor of the others, which it
        may import.
        """
        self.packages.clear()
        self.forget()
        return importlib.import_module(module)


class _StandIn(ModuleType):
    """A module that is not loaded. What is asked of it by name is a `_Name`."""

    def __init__(self, name: str, finder: _Finder):
        super().__init__(name)
        self.__dict__["_finder"] = finder
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self.__dict__["_finder"], self.__name__, name)


class _Name:
    """A function or a class of a module that is not loaded; the real one where it is called or looked into."""

    def __init__(self, finder: _Finder, module: str, name: str):
        self.__dict__.update(_finder=finder, _module=module, _name=name)

    def _real(self) -> Any:
        return getattr(self._finder.real(self._module), self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.startswith(MADE_LATER):
            return _Made(functools.partial(self._made, *args, **kwargs))
        return self._made(*args, **kwargs)

    def _made(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: Any) -> bool:
        return self._is_loaded() and isinstance(instance, self._real())

    def __subclasscheck__(self, subclass: type) -> bool:
        return self._is_loaded() and issubclass(subclass, self._real())

    def _is_loaded(self) -> bool:
        """Of a class whose module is not loaded there are neither instances nor subclasses."""
        return not isinstance(sys.modules.get(self._module), _StandIn | None)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (self._real(),)

    def __or__(self, other: Any) -> Any:
        return Any  # in annotations

    __ror__ = __or__


class _Made:
    """An object of a class that is not loaded, made when something of it is used."""

    def __init__(self, make: Callable[[], Any]):
        self.__dict__["_make"] = make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._make(), name)


# What is asked of the compiler where there is nothing to compile, and of symbolic sizes where sizes are numbers.


def _compiler() -> dict[str, Any]:
    return {
        "allow_in_graph": _as_it_is,
        "assume_constant_result": _as_it_is,
        "disable": _not_compiled,
        "graph_break": lambda *args, **kwargs: None,
    }


def _as_it_is(function: Any) -> Any:
    return function


def _not_compiled(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A function that stays out of compiled code, once there is any."""
    if function is None:
        return lambda given: _not_compiled(given, *args, **kwargs)

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        dynamo = sys.modules.get(DYNAMO)
        if dynamo is None or isinstance(dynamo, _StandIn):
            return function(*given, **named)
        return dynamo.disable(function, *args, **kwargs)(*given, **named)

    return called


def _symbols() -> dict[str, Any]:
    truths = ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious")
    return {
        **{name: _of_numbers(name, lambda condition: condition) for name in truths},
        "free_symbols": _of_numbers("free_symbols", lambda value: set()),
        "free_unbacked_symbols": _of_numbers("free_unbacked_symbols", lambda value: set()),
        "guard_int": _of_numbers("guard_int", int),
        "is_nested_int": _of_numbers("is_nested_int", lambda number: False),
        "sym_and": _of_numbers("sym_and", lambda *all_of: functools.reduce(operator.and_, all_of, True)),
        "sym_or": _of_numbers("sym_or", lambda *any_of: functools.reduce(operator.or_, any_of, False)),
        "sym_eq": _of_numbers("sym_eq", operator.eq),
    }


def _of_numbers(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `symbolic_shapes` that knows the answer where all that it is given is plain."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and all(map(_is_plain, args)):
            return answer(*args)
        module = sys.modules.get(SYMBOLS)
        real = module.__dict__["_finder"].real(SYMBOLS) if isinstance(module, _StandIn) else module
        return getattr(real or importlib.import_module(SYMBOLS), name)(*args, **kwargs)

    return asked


def _is_plain(value: Any) -> bool:
    """Whether sizes in it, a tensor's own too, are numbers."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or (isinstance(value, Tensor) and all(type(size) is int for size in value.shape))


_KNOWN: dict[str, Callable[[], dict[str, Any]]] = {DYNAMO: _compiler, SYMBOLS: _symbols}
