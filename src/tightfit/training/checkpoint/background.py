"""Saving while the training goes on: everything is copied first, then a thread writes the copies."""

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from tightfit.errors import OutputError
from tightfit.training.checkpoint import record as records
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import checked_specs, copy_into, shared_memory


class BackgroundSaver:
    """Mutable: saves checkpoints one at a time, from copies of `copy_bytes(tensors)` in host memory.

    Tensors on the CPU are copied too: a step in place would otherwise change what is being written (pytorch#144657).
    The copies stay for the next save. An error of a save is raised by the next call of `save` or `wait`, or at the end
    of the `with` block, and so is never lost.

    Example:
        >>> import tempfile, torch
        >>> checkpoints = Checkpoints(tempfile.mkdtemp())
        >>> weight = torch.zeros(3)
        >>> with BackgroundSaver(checkpoints) as saver:
        ...     saver.save(1, {"weight": weight}, {})
        ...     _ = weight.fill_(1.0)
        >>> checkpoints.newest_intact().checkpoint.read("weight")
        tensor([0., 0., 0.])
    """

    def __init__(self, checkpoints: Checkpoints, then: Callable[[], Any] | None = None, *, daemon: bool = False):
        """`then` is called in the thread after each save: to prune, for example. With `daemon` the process does not
        wait for a save when it ends: what is half written then is nobody's checkpoint.
        """
        self._checkpoints, self._then, self._daemon = checkpoints, then, daemon
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        record: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Copy everything and begin to save it; an earlier save is waited for.

        What it is given may change as soon as it returns. Raises `OutputError` for what cannot be saved, and the error
        of the earlier save; nothing is begun then.
        """
        self.wait()
        try:
            record = records.decoded(records.encoded(record))
        except ValueError as error:
            raise OutputError(f"{self._checkpoints.folder}: cannot be written: {error}") from error
        copies = self._copied(tensors)
        arguments = (step, copies, record, dict(files or {}))
        name, daemon = "tightfit-checkpoint", self._daemon
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=daemon)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being saved. Raises the error of the save that ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"Besides: {failed}")  # the first error is the one to act on

    def _run(self, *arguments: Any) -> None:
        try:
            self._checkpoints.save(*arguments)
            if self._then is not None:
                self._then()
        except BaseException as error:
            self._error = error  # for `wait`: nobody else sees what a thread raises

    @torch.no_grad()
    def _copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By the same names, tied ones as one; in the buffers of the last save where they fit."""
        checked_specs(tensors)
        same_as = shared_memory(tensors)
        stored = {name: tensor for name, tensor in tensors.items() if name not in same_as}
        self._copies = {name: copy for name, copy in self._copies.items() if _fits(copy, stored.get(name))}
        for name, tensor in stored.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            copy_into(self._copies[name], tensor)
        return {name: self._copies[same_as.get(name, name)] for name in tensors}


def _fits(copy: Tensor, tensor: Tensor | None) -> bool:
    return tensor is not None and (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
