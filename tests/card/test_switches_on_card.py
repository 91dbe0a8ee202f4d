"""On CUDA's path too, what is computed again in backward sees the settings of its forward."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from test_switches import assert_replays_see, stack

pytestmark = [pytest.mark.usefixtures("values"), pytest.mark.keeps("computed-again-backward-sees")]

SETTINGS = {
    "allow_fp16_reduced_precision_reduction": torch.backends.cuda.matmul,
    "allow_bf16_reduced_precision_reduction": torch.backends.cuda.matmul,
    "allow_fp16_accumulation": torch.backends.cuda.matmul,
    "benchmark": torch.backends.cudnn,
}


@contextmanager
def turned(name):
    owner = SETTINGS[name]
    before = getattr(owner, name)
    setattr(owner, name, not before)
    try:
        yield
    finally:
        setattr(owner, name, before)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replay_on_a_card_sees_the_settings_of_forward(name):
    x = torch.randn(8, 4, 96, device="cuda")
    assert_replays_see(partial(turned, name), "recompute", stack().cuda(), x)
