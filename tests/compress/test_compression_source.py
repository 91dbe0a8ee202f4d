"""Folders that hold a model to compress, and the report of a compression."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tightfit.errors import ModelError, SourceError
from tightfit.models.compress.report import CompressionReport, Side, measured
from tightfit.models.compress.source import open_source
from tightfit.models.saving import save_model
from tightfit.training.data.tokenizer import train_tokenizer
from tiny import decoder

IDS = torch.arange(40).view(2, 20)


@pytest.mark.keeps("report-leaves-weights-predictions")
def test_a_decoder_is_opened_as_a_model_of_transformers_measured_and_written(tmp_path):
    model = decoder(hidden_size=32, num_layers=1, vocab_size=300, max_position_embeddings=64).eval()
    save_model(model, tmp_path / "run")
    train_tokenizer(["the sky is blue"], 300).save(tmp_path / "run")

    source = open_source(tmp_path / "run")
    theirs = source.transformers_model()
    architecture = source.write(source.model(), tmp_path / "out")

    assert (source.kind, architecture) == ("run", "LlamaForCausalLM")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        wanted = model(IDS).logits
        assert torch.equal(theirs(IDS).logits, wanted)
        assert torch.equal(read(IDS).logits, wanted)
    assert open_source(tmp_path / "out").kind == "hugging_face"
    assert open_source(tmp_path / "out").tokenizer.encode("blue") == source.tokenizer.encode("blue")

    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    side = measured(theirs, text=IDS, batch_size=2, seq_len=16)
    assert side.parameters == sum(p.numel() for p in model.parameters())
    assert side.step_peak_bytes == side.measured_step_peak_bytes
    assert side.inference_peak_bytes == side.measured_inference_peak_bytes
    losses = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert side.perplexity == pytest.approx(losses.exp().item(), rel=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())
    assert all(parameter.grad is None for parameter in theirs.parameters())


def test_a_run_without_transformers_is_refused_with_what_brings_it(tmp_path, monkeypatch):
    save_model(decoder(hidden_size=32, num_layers=1, vocab_size=300), tmp_path / "run")
    source = open_source(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"this model needs the package transformers: pip install .*\[hf\]"):
        source.transformers_model()


def test_a_report_shows_both_sides_and_what_there_is_of_them():
    report = CompressionReport("prune", Side(parameters=1000, disk_bytes=4096), Side(parameters=500), ("a note",))
    assert report.to_dict()["after"]["parameters"] == 500
    text = str(report)
    assert "50.0%" in text
    assert "4.00 KiB" in text
    assert "perplexity" not in text
    assert text.endswith("a note")


@pytest.mark.keeps("wrong-shares-patterns-texts")
def test_what_holds_no_model_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    said = {
        "nothing": "no such folder",
        "file": "is a file",
        "empty": "holds neither a run nor a config.json",
        "bare": "has a config.json and no weights",
        "broken": "cannot be read",
    }
    for name, what in said.items():
        with pytest.raises(SourceError, match=what) as caught:
            open_source(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_quantised_model_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(SourceError, match=r"quantised already \(torchao\), and prune needs"):
        open_source(tmp_path).refuse_quantised("prune")
