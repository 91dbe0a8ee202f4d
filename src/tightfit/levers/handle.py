"""Handles of applied levers, which remove them again."""

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
        """Remove every lever, the last applied first. Calling it again does nothing.

        A module that no longer exists, or has another forward by now, is skipped.
        """
        while self._parts:
            # Popped after its removal: a call after an interrupt continues with the lever that was interrupted.
            self._parts[-1].remove()
            self._parts.pop()

    remove = undo

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.undo()
