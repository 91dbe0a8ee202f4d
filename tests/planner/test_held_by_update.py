"""What only the optimizer's phase exceeds is refused without a search among levers of forward and backward."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import CannotFit
from tightfit.planner.request import Tracer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tiny import Stack


def loss(model, batch):
    return model(batch["x"]).square().mean()


def blocks():
    return Stack(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])


@pytest.mark.parametrize(("size", "is_held"), [(4, True), (512, False)], ids=["by states", "by activations"])
def test_levers_are_tried_only_where_they_lower_the_peak(monkeypatch, size, is_held):
    parts, part = [], Tracer.part

    def counted(self, *arguments, **named):
        parts.append(arguments)
        return part(self, *arguments, **named)

    monkeypatch.setattr(Tracer, "part", counted)
    model, batch = blocks(), {"x": torch.randn(size, 64)}
    how = {"loss": loss, "device": "cpu"}
    with pytest.raises(CannotFit) as refused:
        tightfit.plan(model, batch, "0.1x", levers=["recompute", "micro_batch"], **how)
    assert (parts == []) == is_held
    if is_held:
        plain = tightfit.estimate(model, batch, **how).peak_bytes
        assert refused.value.least_bytes == plain + UNSEEN_BYTES  # which a plan leaves free
