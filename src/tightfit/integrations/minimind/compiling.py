"""Takes over a model that a script compiles as a whole: the plan compiles its blocks instead.

PyTorch decides what a model that is compiled whole keeps for backward, and a dry run cannot ask it. So the object that
`torch.compile` returns stays as it is, with its names and its state, and calls the model that it is around.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# PyTorch's, of modules that are called while the script's model is looked for. The hooks do what they are meant to.
_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"


class TakenOverCompile:
    """The models that a script compiles while `active()` lasts. They run as eager code. Mutable: those so far."""

    def __init__(self) -> None:
        self._taken: list[nn.Module] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which `torch.compile(model)` leaves the compiling to a plan. `end()` may end it before."""
        self._own = torch.compile
        torch.compile = self._compile
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_OF_HOOKS)
                yield
        finally:
            self.end()

    def end(self) -> None:
        """From now on `torch.compile` compiles, as levers need it."""
        torch.compile = self._own

    def under(self, model: nn.Module) -> nn.Module | None:
        """The model that a wrapper of `torch.compile` is around; None for a model that was not compiled here."""
        return model._orig_mod if any(model is taken for taken in self._taken) else None  # pyright: ignore

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = self._own(*args, **kwargs)
        if isinstance(made, nn.Module) and hasattr(made, "_orig_mod"):
            inner: Any = made._orig_mod
            made.forward = inner.__call__
            self._taken.append(made)
        return made
