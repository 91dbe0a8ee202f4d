"""For tests of devices."""

import pytest

from round_device import round_device


@pytest.fixture
def spec():
    return round_device()
