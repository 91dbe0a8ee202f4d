"""What `transformers` reads of its own files while it is imported, read once and quickly.

It reads some 1,600 files for the names that they export, splits each into lines, and does so twice: its cache holds 128
folders, and there are more models than that. The answers here are its own functions' (5.23.0, `utils/import_utils.py`).
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_READER = "transformers.utils.import_utils"


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, an import of `transformers` reads its files once."""
    sys.meta_path.insert(0, _Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_Finder)


class _Finder(PathFinder):
    """Finds the module that reads, and nothing else."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname == _READER else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_hasten(module: ModuleType) -> None:
            execute(module)
            hasten(module)

        loader.exec_module = execute_and_hasten
        return spec


def hasten(reader: Any) -> None:
    """Have its functions remember every folder, and look at a file from its last `__all__` on only."""
    of_folder = getattr(reader, "create_import_structure_from_path", None)
    exported = getattr(reader, "fetch__all__", None)
    if of_folder is not None and hasattr(of_folder, "__wrapped__"):
        reader.create_import_structure_from_path = functools.cache(of_folder.__wrapped__)
    if exported is not None:
        # It takes the last line that begins so; what stands before that line it only counts.
        reader.fetch__all__ = lambda content: exported(content[max(content.rfind("\n__all__"), 0) :])
