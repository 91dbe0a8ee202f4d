"""Tests on a null card: PyTorch's CUDA build on a runtime that computes nothing (`make test-card`)."""

import importlib
import os
import sys
from pathlib import Path

import pytest

for folder in ("integrations", "levers", "training"):  # their cases run here too
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks

FIGURES = dict(item.split("=") for item in os.environ["TIGHTFIT_NULLCARD"].split(";"))
LATE = FIGURES["late"] != "0"


@pytest.fixture(scope="module")
def values():
    """True values in every thread while the tests of one file run: others measure operators as they are."""
    from tightfit.devices.nullcard.values import true_values

    with true_values(late=LATE) as found:
        yield found
