"""What an applied lever hands back: the way to take it off."""

from collections.abc import Iterable
from typing import Any, Protocol, Self


class Removable(Protocol):
    def remove(self) -> None: ...


class Applied:
    """Levers in force on a model. `undo()`, or leaving the `with` block, restores the model exactly."""

    def __init__(self, parts: Iterable[Removable]):
        self._parts = list(parts)

    @property
    def in_force(self) -> bool:
        return bool(self._parts)

    def undo(self) -> None:
        """Take every lever off, last applied first. Calling it again does nothing, and goes on with what is left where
        it was interrupted. A module that is gone, or has another forward by now, needs nothing.
        """
        while self._parts:
            self._parts[-1].remove()
            self._parts.pop()

    remove = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()
