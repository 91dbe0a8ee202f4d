"""On CUDA's path too, what is computed again in backward sees the settings of its forward."""

from contextlib import contextmanager

import pytest
import torch
from test_switches import Block, Watch, seen
from torch import nn

import tightfit

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
    model = nn.Sequential(*[Block() for _ in range(3)]).cuda()
    x, present = torch.randn(8, 4, 96, device="cuda"), seen()
    with tightfit.recompute(model, "*"):
        for _ in range(3):
            with turned(name):
                inside = seen()
                loss = model(x).square().sum()
            with Watch() as watch:
                loss.backward()
            assert watch.again == {inside} != {present}
            assert watch.others == {present}
