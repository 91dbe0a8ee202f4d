"""Finds what code can change: the modules, optimizers and tensors that a function, its inputs or a frame refer to by
name, and puts back the names that the code rebinds.
"""

import dis
import functools
import sysconfig
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

import tightfit
from tightfit.runtime.module_paths import named_modules, tensors_of

_DEPTH = 4  # levels of containers and objects below a name that are searched
_MANY = 100_000  # a container with more items than this holds data, not models
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(tightfit.__file__).parent)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MISSING = object()


class Reached:
    """The objects that code refers to. `modules` are the outermost ones by name, `tensors` those that are no module's.

    `values` are everything that the names refer to, `containers` the lists, sets and dicts that were searched, and the
    attributes of objects.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.containers: list[Any] = []
        self._found: list[tuple[str, nn.Module]] = []
        self._seen: dict[int, Any] = {}  # with the items themselves, so that no other item gets the same id
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []

    @classmethod
    def of_call(cls, function: Any, inputs: Any) -> "Reached":
        """The objects that a call of `function` with these inputs can reach."""
        found = cls()
        found.values += [function, inputs]
        found._look("", function, 0)
        call = vars(type(function)).get("__call__")
        if isinstance(call, FunctionType):
            found._look_in_function(call, 0)
        found._look("inputs", inputs, 0)
        found._sort()
        return found

    @classmethod
    def of_frame(cls, frame: FrameType) -> "Reached":
        """The objects that the code of a running function, script or cell of a notebook can reach."""
        found, variables = cls(), dict(frame.f_locals)
        for name in dict.fromkeys([*variables, *names_in(frame.f_code)]):
            # A script's or a notebook's variables are all there, whether or not this code mentions them.
            if frame.f_locals is frame.f_globals and name not in names_in(frame.f_code):
                continue
            value = variables.get(name, frame.f_globals.get(name, _MISSING))
            if value is not _MISSING and not name.startswith("__"):
                found.values.append(value)
                found._look(name, value, 0)
        found._sort()
        return found

    def paths_and_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module with its path; the paths of several outermost modules begin with their names."""
        for prefix, root in self.modules.items():
            for path, module in named_modules(root):
                yield f"{prefix}.{path}".strip("."), module

    def all_tensors(self) -> list[Tensor]:
        """The tensors of the modules, and all others."""
        return [*(t for _, module in self.paths_and_modules() for t in tensors_of(module)), *self.tensors]

    def put_names_back(self) -> None:
        """Let closures' and global variables that the code has rebound refer to what they referred to before."""
        for cell, value in self._cells:
            if value is not _MISSING:
                cell.cell_contents = value
        for variables, name, value in self._globals:
            if value is _MISSING:
                variables.pop(name, None)
            else:
                variables[name] = value

    def _look(self, name: str, item: Any, depth: int) -> None:
        if id(item) in self._seen or depth > _DEPTH or isinstance(item, type | types.ModuleType):
            return
        self._seen[id(item)] = item
        if isinstance(item, Tensor):
            self.tensors.append(item)
        elif isinstance(item, nn.Module):
            self._found.append((name, item))
        elif isinstance(item, torch.optim.Optimizer):
            self.optimizers.append(item)
        elif isinstance(item, functools.partial):
            for part in (item.func, item.args, item.keywords):
                self._look(name, part, depth)
        elif isinstance(item, MethodType):
            self._look(name, item.__self__, depth)
            self._look(name, item.__func__, depth)
        elif isinstance(item, FunctionType):
            self._look_in_function(item, depth)
        elif isinstance(item, _CONTAINERS):
            if len(item) <= _MANY:
                self.containers += [item] if hasattr(item, "clear") else []
                named = item.items() if isinstance(item, dict) else ((name, child) for child in item)
                for key, child in list(named):
                    self._look(key if isinstance(key, str) else name, child, depth + 1)
        elif hasattr(item, "__dict__"):
            self.containers.append(vars(item))
            for key, child in list(vars(item).items()):
                self._look(str(key), child, depth + 1)

    def _look_in_function(self, function: FunctionType, depth: int) -> None:
        code, variables = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # nothing was assigned to it yet
                self._cells.append((cell, _MISSING))
                continue
            self._cells.append((cell, value))
            self.values.append(value)
            self._look(name, value, depth)
        for value in (function.__defaults__, function.__kwdefaults__):
            self._look("default", value, depth)
        if _is_a_librarys(code):
            return
        for name in names_in(code):
            if name in variables and not name.startswith("__"):
                self.values.append(variables[name])
                self._look(name, variables[name], depth + 1)
        self._globals += [(variables, name, variables.get(name, _MISSING)) for name in assigned_globals(code)]

    def _sort(self) -> None:
        """Keep the outermost modules, and the tensors that no module holds."""
        inner = {id(m) for _, root in self._found for _, m in named_modules(root) if m is not root}
        roots = [(name, module) for name, module in self._found if id(module) not in inner]
        for name, module in roots:
            name = "" if len(roots) == 1 else name or type(module).__name__
            while name in self.modules:
                name = f"{name}'"
            self.modules[name] = module


def names_in(code: CodeType) -> list[str]:
    """The names that code mentions, and the code of functions inside of it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in names_in(constant)]
    return list(dict.fromkeys([*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars, *inner]))


def assigned_globals(code: CodeType) -> set[str]:
    """The global variables that code assigns to, and the code of functions inside of it."""
    own = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return own.union(*(assigned_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_a_librarys(code: CodeType) -> bool:
    """True if code is PyTorch's, an installed package's or ours: its global variables are no state of the user's."""
    return code.co_filename.startswith((*_INSTALLED, _OURS, "<frozen"))
