"""Direct preference optimisation: the loss, its reference, and a training on preference pairs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up_fits import leave_out_predictions
from test_resume import interrupted, timeless
from tiny_training import Listener, metrics, settings
from torch import nn

from quick_trainings import leave_out_pictures
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.step import forward_backward
from tightfit.training.api import train
from tightfit.training.objective import counted
from tightfit.training.preferences import REFERENCE, PreferenceLoss, answer_log_probs, from_file, to_file

VOCABULARY, LENGTH, BETA = 61, 12, 0.5
SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 400, "max_position_embeddings": 96}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_pictures(monkeypatch)


def decoder(**experts: Any) -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY, **experts}
    return Decoder(DecoderConfig(**shape, max_position_embeddings=LENGTH))


def pairs() -> dict[str, torch.Tensor]:
    """Three pairs: prompts of 4 tokens, answers of several lengths."""
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (6, LENGTH))
    labels = ids.clone()
    labels[:, :4] = -100
    for row, length in enumerate((12, 9, 6, 12, 7, 5)):
        labels[row, length:] = -100
    return {"input_ids": ids, "labels": labels, REFERENCE: torch.randn(6)}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.keeps("preference-pairs-train-loss")
def test_the_loss_is_that_of_the_paper_computed_token_by_token():
    model, batch = decoder().double(), pairs()
    log_probs = model(batch["input_ids"]).logits.log_softmax(-1)
    sums = [
        sum(
            log_probs[row, at - 1, batch["input_ids"][row, at]]
            for at in range(1, LENGTH)
            if batch["labels"][row, at] >= 0
        )
        for row in range(6)
    ]
    gains = [total - reference for total, reference in zip(sums, batch[REFERENCE], strict=True)]
    margins = torch.stack([gains[i] - gains[i + 1] for i in (0, 2, 4)])
    expected = -torch.log(torch.sigmoid(BETA * margins)).mean()

    assert PreferenceLoss(BETA)(model, counted(batch)).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.keeps("preference-pairs-train-loss")
def test_micro_batches_of_whole_pairs_add_up_to_the_gradient_of_the_batch():
    loss, found = PreferenceLoss(BETA), []
    for count in (1, 3):
        model = decoder().double()
        forward_backward(model, as_parts(split_batch(counted(pairs()), count), loss), loss)
        found.append(gradient(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


@pytest.mark.keeps("preference-pairs-train-loss")
def test_experts_are_balanced_in_each_micro_batch_by_its_share_of_the_pairs():
    """Three pairs in a micro-batch of two and one of one."""
    loss, experts, batch = PreferenceLoss(BETA), {"num_experts": 4, "experts_per_token": 2}, counted(pairs())
    balanced = decoder(**experts, auxiliary_loss_coefficient=0.5).train()
    free = decoder(**experts, auxiliary_loss_coefficient=0.0, z_loss_coefficient=0.0).train()
    for rows in (slice(0, 4), slice(4, 6)):
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        auxiliary = balanced(part["input_ids"]).auxiliary_loss
        assert auxiliary > 0.1
        share = len(part["input_ids"]) / len(batch["input_ids"])
        added = loss(balanced, part) - loss(free, part)
        torch.testing.assert_close(added, auxiliary * share, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        of_evaluation = [loss(model.eval(), batch) for model in (balanced, free)]
    assert torch.equal(*of_evaluation)


def test_a_chunked_head_computes_it_without_the_logits():
    model, batch = decoder(), pairs()
    plain = answer_log_probs(model, batch).of_rows
    with apply_chunked_loss(model, "head", 5):
        chunked = answer_log_probs(model, batch).of_rows
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-5)


def test_a_kept_reference_is_read_back_and_nothing_else_is(tmp_path: Path):
    training, validation = np.arange(6, dtype=np.float32), np.ones(2, np.float32)
    path = tmp_path / "reference.safetensors"
    content_ = to_file(training, validation, "these pairs")
    path.write_bytes(content_)
    kept = from_file(path, "these pairs")
    assert kept is not None
    assert [values.tolist() for values in kept] == [training.tolist(), validation.tolist()]
    assert from_file(path, "other pairs") is None
    for damaged in (content_[:-4], content_[:-1] + bytes([content_[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        assert from_file(path, "these pairs") is None
    assert from_file(tmp_path / "missing", "these pairs") is None


def preferring(folder: Path, source: Path, **training: object):
    with source.open("w") as file:
        for number in range(24):
            asked = {"role": "user", "content": f"Is {number} a number?"}
            answers = [{"role": "assistant", "content": text} for text in ("Yes, it is.", "No, it is a house.")]
            file.write(json.dumps({"chosen": [asked, answers[0]], "rejected": [asked, answers[1]]}) + "\n")
    data = {"source": str(source), "sequence_length": 96, "vocab_size": 400, "validation_fraction": 0.1}
    steps = {"max_steps": 8, "batch_size": 4, "learning_rate": 3e-3, **training}
    return settings(folder, model={**SHAPE, "dropout": 0.1}, data=data, training=steps)


def test_a_training_on_pairs_learns_to_prefer_the_chosen_answer(tmp_path: Path):
    config = preferring(tmp_path, tmp_path / "pairs.jsonl", max_steps=12)
    listener = Listener()
    result = train(config, reporter=listener)
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert losses[0] == pytest.approx(np.log(2), abs=0.05)  # at first the model is its own reference, but for dropout
    assert np.mean(losses[-3:]) < 0.9 * losses[0]
    assert result.validation_loss is not None
    assert result.validation_loss < np.log(2)
    assert result.perplexity is None
    assert any("preference pairs" in value for name, value in listener.told if name == "note")


@pytest.mark.keeps("preference-pairs-train-loss")
def test_an_interrupted_training_on_pairs_ends_as_the_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave_out_predictions(monkeypatch)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    train(preferring(whole, tmp_path / "pairs.jsonl"))
    config = preferring(cut, tmp_path / "pairs.jsonl")
    interrupted(config, 3)
    assert train(config, resume=True).resumed_from == 3
    assert timeless(cut) == timeless(whole)
