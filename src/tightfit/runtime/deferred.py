"""Replaces packages that take seconds to import by stand-ins, in commands that only run a dry run.

A dry run needs nothing of PyTorch's compiler. But PyTorch's meta kernels, its optimizers and `transformers` import the
compiler, sympy and packages for many devices: to check whether a size is symbolic (never here), to mark a function for
the compiler (which does not run here), or to name a class in a check. Inside `deferred` such an import gives a
stand-in. It answers questions about plain numbers, and whether an object is an instance of a class that was never
loaded. Any other use raises `GaveWay`. The real package cannot replace a stand-in whose names other modules already
hold, so the command must restart with everything loaded (`cli/light.py`).

Use it only in a process that answers one question and ends: functions that were not marked for the compiler stay
unmarked.
"""

import functools
import importlib.abc
import importlib.machinery
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from torch import Tensor

DYNAMO, SYMBOLS = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
PACKAGES = (
    DYNAMO,
    SYMBOLS,
    "sympy",
    "torch.utils._sympy",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "torch.distributed._functional_collectives",
    "torchao",
    "accelerate",
)
MADE_LATER = "torch.distributed.tensor"  # transformers makes placements of its shards when it is imported
_PLAIN = (bool, int, float)


class GaveWay(BaseException):
    """A stand-in was used in a way that only the real package supports.

    Not an `Exception`: a package that tries an import and continues without it must not catch this.
    """


@contextmanager
def deferred() -> Iterator["Deferral"]:
    """A context in which importing one of `PACKAGES` gives a stand-in, unless the package is loaded already."""
    deferral = Deferral([name for name in PACKAGES if name not in sys.modules])
    sys.meta_path.insert(0, deferral)
    try:
        yield deferral
    finally:
        sys.meta_path.remove(deferral)
        deferral.forget()


class Deferral(importlib.abc.Loader):
    """The importer of stand-ins. Mutable: whether one was imported, and the name of the use that gave way."""

    def __init__(self, packages: Sequence[str]):
        self.packages = tuple(packages)
        self.is_used = False
        self.gave_way: str | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # Submodules are imported by their full names.
        mine = any(name == package or name.startswith(f"{package}.") for package in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.is_used = True
        return _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        answers = {DYNAMO: _compiler, SYMBOLS: _symbols}.get(module.__name__)
        if answers is not None:
            module.__dict__.update(answers(self))

    def give_way(self, name: str) -> NoReturn:
        self.gave_way = name
        raise GaveWay(name)

    def forget(self) -> None:
        """Remove all stand-ins from `sys.modules`, so that later imports find the real packages."""
        for name, module in list(sys.modules.items()):
            if isinstance(module, _StandIn) and module.__dict__["_deferral"] is self:
                del sys.modules[name]
                # Importing a submodule also sets it as an attribute of its parent, which may be a real package.
                parent, _, child = name.rpartition(".")
                above = sys.modules.get(parent)
                if above is not None and above.__dict__.get(child) is module:
                    delattr(above, child)


class _StandIn(ModuleType):
    """A stand-in for a module. Its attributes are `_Name`s."""

    def __init__(self, name: str, deferral: Deferral):
        super().__init__(name)
        self.__dict__["_deferral"] = deferral
        self.__dict__["__path__"] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks every module for `__path__`, `__file__` and the like
            raise AttributeError(name)
        self.__dict__[name] = found = _Name(self.__dict__["_deferral"], f"{self.__name__}.{name}")
        return found


class _Name:
    """A stand-in for a function, a class or a value of a module.

    It can be passed on, named in an annotation, and used in `isinstance` and `issubclass`, which answer False. Any
    other use gives way.
    """

    def __init__(self, deferral: Deferral, name: str):
        self.__dict__.update(_deferral=deferral, _name=name)

    def __call__(self, *args: Any, **kwargs: Any) -> "_Name":
        return _Name(self._deferral, f"{self._if_made_later()}(...)")

    def __bool__(self) -> bool:
        return bool(self._if_made_later())

    def _if_made_later(self) -> str:
        """The name, for classes whose objects may be made and kept; else give way."""
        return self._name if self._name.startswith(f"{MADE_LATER}.") else self._deferral.give_way(self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._deferral.give_way(f"{self._name}.{name}")

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Any if isinstance(other, type | _Name | None) else self._deferral.give_way(self._name)

    __ror__ = __or__

    def __eq__(self, other: object) -> bool:
        return self is other or (not isinstance(other, type | _Name) and self._deferral.give_way(self._name))

    def __hash__(self) -> int:
        return id(self)


def _gives_way(self: _Name, *args: Any) -> Any:
    self._deferral.give_way(self._name)


_SPECIAL = (
    "mro_entries len length_hint iter next reversed contains getitem setitem delitem enter exit await aiter "
    "setattr delattr lt le gt ge int float complex index round trunc floor ceil neg pos abs invert divmod rdivmod ior "
    "str format reduce_ex"
)
_OF_TWO = "add sub mul matmul truediv floordiv mod pow lshift rshift and xor"
for _name in (*_SPECIAL.split(), *(side + name for name in _OF_TWO.split() for side in ("", "r", "i"))):
    setattr(_Name, f"__{_name}__", _gives_way)  # Python looks these up on the class, past `__getattr__`


# The answers of stand-ins: of the compiler when there is nothing to compile, of symbolic sizes when sizes are numbers.


def _compiler(deferral: Deferral) -> dict[str, Any]:
    return {
        "allow_in_graph": _as_it_is,
        "assume_constant_result": _as_it_is,
        "disable": _not_compiled,
        "graph_break": lambda *args, **kwargs: None,
    }


def _as_it_is(function: Any) -> Any:
    return function


def _not_compiled(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _as_it_is if function is None else function


def _symbols(deferral: Deferral) -> dict[str, Any]:
    truths = ("expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious")
    answers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(truths, lambda condition: condition),
        "free_symbols": lambda value: set(),
        "free_unbacked_symbols": lambda value: set(),
        "guard_int": int,
        "is_nested_int": lambda number: False,
        "sym_and": lambda *all_of: functools.reduce(operator.and_, all_of, True),
        "sym_or": lambda *any_of: functools.reduce(operator.or_, any_of, False),
        "sym_eq": operator.eq,
    }
    return {name: _of_numbers(deferral, name, answer) for name, answer in answers.items()}


def _of_numbers(deferral: Deferral, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `symbolic_shapes` that answers if all arguments are plain numbers, and else gives way."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not all(map(_is_plain, args)):
            deferral.give_way(f"{SYMBOLS}.{name}")
        return answer(*args)

    return asked


def _is_plain(value: Any) -> bool:
    """Whether a value contains plain numbers only. Of a tensor, its sizes count."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or (isinstance(value, Tensor) and all(type(size) is int for size in value.shape))
