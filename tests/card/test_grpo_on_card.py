"""`tightfit train` on rewards on CUDA's path: the peak of every phase is the predicted one."""

import pytest
from test_grpo import rewarded

from quick_trainings import leave_out_pictures
from tightfit.training.api import train

pytestmark = pytest.mark.usefixtures("values")
SHAPE = {"hidden_size": 128, "num_layers": 3, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 48}


@pytest.mark.sampled(1)
@pytest.mark.keeps("rewards-train-policy")
@pytest.mark.parametrize("budget", [None, "0.95x"])
def test_the_peak_of_each_phase_on_a_card_is_the_predicted_one(tmp_path, monkeypatch, budget):
    leave_out_pictures(monkeypatch)
    memory = {} if budget is None else {"budget": budget}
    config = rewarded(tmp_path / "a", device="cuda", model=SHAPE, max_steps=4, grpo={"iterations": 2}, memory=memory)
    result = train(config)
    predicted, measured = result.predicted_phase_bytes, result.measured_phase_bytes
    assert list(predicted) == ["generation", "log_probs", "update"]
    assert measured == predicted
