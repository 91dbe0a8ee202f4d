"""A training of adapters through the whole road: planned, run, written, and read back."""

import pytest
from tiny_training import settings

from tightfit.models.generation import generate_text
from tightfit.models.saving import load_model
from tightfit.training.api import train
from tightfit.training.config import parse_config
from tightfit.training.data.tokenizer import load_tokenizer
from tiny_adapters import saved_llama


# Eight seconds each, most of them imports; test_adapters.py predicts and plans adapters on both.
@pytest.mark.keeps("adapters-saved-peft-format")
@pytest.mark.slow
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_adapters_are_trained_within_the_budget_and_the_run_continues_a_text(tmp_path, base):
    folder = saved_llama(tmp_path / "base")
    sections = settings(tmp_path, training={"max_steps": 6}, memory={"budget": "0.7x"}).model_dump(mode="json")
    sections["model"] = {"path": str(folder), "adapter": {"r": 4, "base": base}}
    result = train(parse_config(sections))
    assert result.measured_peak_bytes <= result.budget_bytes
    assert result.predicted_peak_bytes == pytest.approx(result.measured_peak_bytes, rel=1e-3)
    assert result.last_loss < result.first_loss
    run = tmp_path / "run"
    assert not (run / "model.safetensors").exists()
    assert (run / "adapter_model.safetensors").stat().st_size < (folder / "model.safetensors").stat().st_size / 5
    trained = load_model(run)
    assert all(bool(p.count_nonzero()) for name, p in trained.named_parameters() if "lora_B" in name)
    assert generate_text(trained, load_tokenizer(run), "The mill", max_new_tokens=4, seed=0).startswith("The mill")
