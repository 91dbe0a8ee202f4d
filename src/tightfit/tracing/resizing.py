"""Follows storages that change their size in a dry run: FSDP2 frees and allocates gathered parameters that way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.runtime.internals import sizes_of_storages_by
from tightfit.tracing.recording import Recording
from tightfit.tracing.unbacked import is_unbacked_storage

_PLAYED = "_tightfit_bytes"  # of a storage without memory: the size that it was given last
RESIZE = "storage.resize_"


@contextmanager
def resizes_followed(dry: Recording) -> Iterator[None]:
    """A context in which the dry run's ledger follows resized storages, and those without memory can be resized."""

    def resize(storage: Any, nbytes: int) -> bool:
        grows = nbytes > storage.nbytes()
        if grows:
            dry.begin([])
        is_counted = dry.ledger.resize(storage, nbytes)
        if grows:
            dry.note(RESIZE, 0.0)
        if not (is_counted and is_unbacked_storage(storage)):
            return False
        storage.__dict__[_PLAYED] = nbytes
        return True

    with sizes_of_storages_by(resize, lambda storage: storage.__dict__.get(_PLAYED)):
        yield
