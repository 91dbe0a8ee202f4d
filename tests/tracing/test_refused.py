"""What cannot be run dry is told in one line: where, and what to do."""

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import ModelError, TraceError

LIBRARY = torch.library.Library("tightfit_refused", "DEF")  # an operator that has no shapes without data
LIBRARY.define("no_shapes(Tensor x) -> Tensor")
LIBRARY.impl("no_shapes", lambda x: x.clone(), "CPU")


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.speech = nn.Linear(8, 5)
        self.width = width

    def forward(self, x):
        return torch.ops.tightfit_refused.no_shapes(self.speech(x.view(4, -1, self.width))).sum()


BATCH = {"x": torch.randn(4, 6, 8)}


def test_an_operator_without_shapes_is_told_with_what_to_do():
    with pytest.raises(
        TraceError, match=r"no_shapes.* cannot be run dry in .*register one with torch\.library"
    ) as told:
        tightfit.estimate(Model(), BATCH)
    assert "http" not in str(told.value)
    assert "\n" not in str(told.value)


def test_a_step_that_does_not_run_is_asked_about():
    with pytest.raises(TraceError, match=r"cannot be run dry in speech: .*: does the step run without a plan\?"):
        tightfit.estimate(Model(width=4), BATCH)


class Lazy(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).sum()


@pytest.mark.parametrize(
    ("layer", "name"), [(nn.LazyLinear, "layers.0.weight"), (nn.LazyBatchNorm1d, "layers.0.weight")]
)
def test_lazy_modules_that_have_met_no_batch_are_refused_by_name(layer, name):
    model = Lazy(layer(8) if layer is nn.LazyLinear else layer(), nn.Linear(8, 8))
    batch = {"x": torch.randn(4, 8)}
    for ask in (
        lambda: tightfit.estimate(model, batch),
        lambda: tightfit.plan(model, batch, "0.5x"),
        lambda: tightfit.trace(model, **batch),
    ):
        with pytest.raises(ModelError, match=rf"needs shapes, and {name} of a lazy module has none yet: run model"):
            ask()
    with torch.no_grad():
        model(**batch)
    assert tightfit.estimate(model, batch, loss=lambda model, batch: model(**batch)).peak_bytes
