"""What cannot be run dry is told in one line: where, and what to do."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import TraceError


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.speech = nn.Linear(8, 5)
        self.width = width

    def forward(self, x, targets):
        scores = self.speech(x.view(4, -1, self.width)).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((4,), 6), torch.full((4,), 3)
        return torch.nn.functional.ctc_loss(scores, targets, *lengths)


BATCH = {"x": torch.randn(4, 6, 8), "targets": torch.ones(4, 3, dtype=torch.int64)}


def test_an_operator_without_shapes_is_told_with_what_to_do():
    with pytest.raises(
        TraceError, match=r"_ctc_loss.* cannot be run dry in .*register one with torch\.library"
    ) as told:
        tightfit.estimate(Model(), BATCH)
    assert "http" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_step_that_does_not_run_is_asked_about():
    with pytest.raises(TraceError, match=r"cannot be run dry in speech: .*: does the step run without a plan\?"):
        tightfit.estimate(Model(width=4), BATCH)
