"""Replaces functions of other packages while any thread simulates a CUDA device, and puts them back afterwards.

Every replacement asks whether its own thread simulates a device, and otherwise calls the original.
"""

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_ABSENT = object()
DYNAMO = "torch._dynamo"  # keeps the functions that it finds when it is imported: a real step calls the originals
Install = Callable[[ModuleType, "Replacements"], None]


class Replacements:
    """Mutable: attributes of modules, classes and objects with the values that they had before.

    The first thread that enters replaces them, and the last one that leaves puts them back. A module that is not
    imported yet is replaced when something imports it: nothing is imported for the purpose.
    """

    def __init__(self, installers: Mapping[str, Install]):
        self._installers = installers
        self._lock = threading.RLock()
        self._inside = 0
        self._before: list[tuple[Any, str, Any]] = []
        self._finder = _Finder(self)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the last thread leaves."""
        with self._lock:
            if self._inside:  # a thread that imports a module while the last one leaves
                self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, value)

    def imported(self, module: ModuleType) -> None:
        """Install the replacements of a module that was imported now."""
        self._installers[module.__name__](module, self)

    def waits_for(self, name: str) -> bool:
        return name in self._installers or name == DYNAMO

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the replacements are installed."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """A context in which the attributes have the values that they had before."""
        with self._lock:
            replaced = [(owner, name, vars(owner)[name], value) for owner, name, value in self._before]
            for owner, name, _, value in reversed(replaced):
                _put(owner, name, value)
            try:
                yield
            finally:
                for owner, name, value, _ in replaced:
                    setattr(owner, name, value)

    def _enter(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            sys.meta_path.insert(0, self._finder)
            for name in self._installers:
                if name in sys.modules:
                    self.imported(sys.modules[name])

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            sys.meta_path.remove(self._finder)
            while self._before:
                _put(*self._before.pop())


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


class _Finder:
    """Finds nothing itself. It notices the import of a module that has replacements."""

    def __init__(self, replacements: Replacements):
        self._replacements = replacements

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._replacements.waits_for(name):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # of several that wait, each wraps the next one's
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self._replacements)
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, then installs the replacements. The module keeps its own loader."""

    def __init__(self, loader: Any, replacements: Replacements):
        self._loader, self._replacements = loader, replacements

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if module.__name__ == DYNAMO:
            with self._replacements.put_back():
                self._loader.exec_module(module)
        else:
            self._loader.exec_module(module)
            self._replacements.imported(module)
