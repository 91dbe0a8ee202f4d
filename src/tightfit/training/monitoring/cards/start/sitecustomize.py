"""Python runs this at its start in the processes of `tightfit run`, which puts this folder on their path.

It lets the user's own file of this name run, and watches the process once it has imported torch.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)


class _WatchesTorch:
    """An importer that imports torch as ever, and then begins to watch. Asking where torch is imports nothing yet."""

    def __init__(self) -> None:
        self.asks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch" or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
            from tightfit.training.monitoring.cards.process import watch_this_process

            watch_this_process()

        spec.loader.exec_module = exec_module
        return spec


def _run_the_users_own() -> None:
    others = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _WatchesTorch())  # pyright: ignore[reportArgumentType]
_run_the_users_own()
