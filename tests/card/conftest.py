"""Tests of CUDA's path, on a null card: PyTorch's CUDA build on a runtime that computes nothing (`make test-card`).

Some run on a real card too (`make test-real-card`).
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

for folder in ("integrations", "levers", "ranks", "training"):  # their cases run here too
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks

NULL_CARD = os.environ.get("TIGHTFIT_NULLCARD")  # its figures
LATE = NULL_CARD is not None and dict(item.split("=") for item in NULL_CARD.split(";"))["late"] != "0"


@pytest.fixture(scope="module")
def values():
    """True values in every thread while the tests of one file run: others measure operators as they are.

    A real card computes: there operators are to be repeatable.
    """
    if NULL_CARD is None:
        torch.use_deterministic_algorithms(True)
        yield None
        torch.use_deterministic_algorithms(False)
        return
    from tightfit.devices.nullcard.values import true_values

    with true_values(late=LATE) as found:
        yield found


@pytest.fixture(autouse=LATE)
def no_collector_within_a_cards_work():
    """The end of pinned memory waits for the card. Where work of a card that is late runs Python, a collector in there
    would wait for the work itself.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forget_what_is_cached():
    from tightfit.runtime.internals import clear_cublas_workspaces

    gc.collect()
    gc.collect()  # storages that Python holds in cycles go in a second pass
    clear_cublas_workspaces()  # one that was taken from a block nobody split counts with the block's rest
    torch.cuda.empty_cache()


@pytest.fixture
def nothing_cached():
    """For a test that counts what its own steps take."""
    forget_what_is_cached()
    yield
    forget_what_is_cached()  # other files count on taking their own


@pytest.fixture
def null_card():
    """For a test whose subject is the null card itself."""
    if NULL_CARD is None:
        pytest.skip("of the null card itself")


@pytest.fixture
def growing_segments(monkeypatch):
    """Segments of which no block stays unsplit, in this process and for predictions."""
    forget_what_is_cached()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    yield
    forget_what_is_cached()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where a peak was another one than predicted once in many runs, nobody can ask later who held it."""
    report = yield
    import three_steps

    if report.failed and three_steps.history:
        from tightfit.memory.snapshot import snapshot_of

        found = snapshot_of(three_steps.history[0])
        lines = [f"{held.bytes:>14,} in {held.count:3} {held.where} ({held.phase})" for held in found.holders]
        report.sections.append(("at the peak of the last three steps", "\n".join([f"{found.peak_bytes:,}", *lines])))
    three_steps.history.clear()
    return report
