"""For the tests of checkpoints."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_MEMORY = "/dev/shm"  # Linux's file system in memory: there folders are made and removed a hundred times as fast


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for thousands of small files that no test of the disk itself needs."""
    place = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tightfit-test-", dir=place) as folder:
        yield Path(folder)
