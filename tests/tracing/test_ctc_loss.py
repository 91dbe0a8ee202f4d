"""The loss of speech recognition runs dry: what it keeps depends on the lengths of the targets."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.memory.allocator import measured_peak
from tightfit.planner.api import estimate

LENGTHS = torch.tensor([6, 3, 5, 2])


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 20))

    def forward(self, sound, targets, lengths):
        scores = self.layers(sound).log_softmax(-1)
        return F.ctc_loss(scores, targets, torch.full((4,), 50), lengths)


def padded():
    return torch.randn(50, 4, 16), torch.randint(1, 20, (4, 9)), LENGTHS


def joined():
    return torch.randn(50, 4, 16), torch.randint(1, 20, (int(LENGTHS.sum()),)), LENGTHS


@pytest.mark.keeps("loss-speech-recognition-ctc")
@pytest.mark.parametrize("batch", [padded, joined])
def test_a_step_with_it_is_predicted_to_the_byte(batch):
    model, parts = Speech(), batch()

    def step():
        model(*parts).backward()
        model.zero_grad()

    step()
    measured = measured_peak(step, [*model.parameters(), *parts])
    assert estimate(model, parts, optimizer="sgd", loss=lambda m, b: m(*b)).peak_bytes == measured


@pytest.mark.keeps("loss-speech-recognition-ctc")
def test_longer_targets_take_more_though_every_shape_is_the_same():
    sound, targets = torch.randn(50, 4, 16), torch.randint(1, 20, (4, 40))
    peaks = [
        estimate(Speech(), (sound, targets, lengths), optimizer="sgd", loss=lambda m, b: m(*b)).peak_bytes
        for lengths in (LENGTHS, LENGTHS + 20)
    ]
    assert peaks[0] < peaks[1]
