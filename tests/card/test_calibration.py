"""A calibration leaves three quarters of what is free, and ends, however little that is.

Needs a card, which may be one that computes nothing.
"""

import pytest
import torch

from tightfit.devices import calibrate as module
from tightfit.devices.cost import CostModel
from tightfit.devices.room import SHARE, NoRoom

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's CUDA build and a card")
MIB = 2**20
WORKSPACES = 32 * MIB  # of libraries


@pytest.fixture(autouse=True)
def given_back():
    """What others were played to hold is no segment in which later tests' small tensors would lie."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("left_mib", [600, 2048, 8192, None])
def test_it_takes_a_quarter_of_what_is_free_at_most(left_mib, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.05)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    others = torch.empty(max(0, free - left_mib * MIB) if left_mib else 0, dtype=torch.uint8, device="cuda")
    before, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    torch.cuda.reset_peak_memory_stats()
    spec = module.calibrate("cuda")
    assert torch.cuda.max_memory_reserved() - before <= SHARE * free
    assert torch.cuda.memory_reserved() - before <= WORKSPACES, "what was reserved is released"
    assert len(spec.products) == 21
    assert len(spec.attention) == 12
    assert min(spec.launch_seconds, spec.recording_seconds) > 0
    assert spec.captured_seconds is not None
    assert CostModel(spec)
    del others


def test_where_nothing_is_left_it_says_so(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.05)
    torch.cuda.empty_cache()
    others = torch.empty(torch.cuda.mem_get_info()[0] - 4 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(NoRoom):
        module.calibrate("cuda")
    del others


def test_a_card_that_computes_nothing_is_not_measured(capsys):
    from tightfit.cli.measuring import calibrate
    from tightfit.devices.present import cache_path

    calibrate("cuda", force=True)
    assert "published figures" in capsys.readouterr().out
    assert not cache_path("cuda").exists()
