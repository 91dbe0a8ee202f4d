"""A training whose weights are in bf16."""

import pytest
import torch
from tiny_training import Listener, settings

from tightfit.models.saving import load_model
from tightfit.training.api import train


@pytest.mark.keeps("step-bf16-weights-predicted")
def test_a_training_in_bf16_has_the_predicted_peak_says_how_it_rounds_and_keeps_the_dtype(tmp_path):
    told = Listener()
    found = train(settings(tmp_path, model={"dtype": "bf16"}, training={"max_steps": 2}), reporter=told)
    assert found.measured_peak_bytes == pytest.approx(found.predicted_peak_bytes, rel=1e-3)
    assert {p.dtype for p in load_model(tmp_path / "run").parameters()} == {torch.bfloat16}
    assert any("rounded stochastically" in note for kind, note in told.told if kind == "note")
