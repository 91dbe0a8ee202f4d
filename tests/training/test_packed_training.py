"""Trainings on packed and padded rows, from the configuration to the run's folder."""

import json
import random
from pathlib import Path

import pytest
import torch
from made_up_fits import leave_out_predictions
from packed_rows import LENGTH, decoder, document, packed
from tiny_training import Listener, metrics, settings
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from quick_trainings import leave_out_pictures
from tightfit.errors import ConfigError, ModelError
from tightfit.levers.recompute import OtherOperators
from tightfit.step import model_loss
from tightfit.training.api import train
from tightfit.training.config import load_config
from tightfit.training.data.packing import StreamPosition
from tightfit.training.data.prepare import prepare_data

WORDS = ["house", "mill", "castle", "the", "of", "tower"]


def texts(folder: Path) -> str:
    """Documents of 1 to 30 words, as JSON lines."""
    drawn = random.Random(0)
    lines = (" ".join(drawn.choices(WORDS, k=drawn.randint(1, 30))) for _ in range(120))
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return str(path)


def config_of(folder: Path, memory: dict, **data):
    training = {"max_steps": 6, "gradient_accumulation_steps": "auto" if memory else 1}
    return settings(folder, data={"source": texts(folder), **data}, memory=memory, training=training)


WAYS = {
    "packed": ({"packing": "best_fit"}, {}),
    "packed, planned": ({"packing": "best_fit"}, {"budget": "0.7x"}),
    "buckets": ({"buckets": True}, {}),
    "buckets, planned": ({"buckets": True}, {"budget": "0.7x"}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("data", "memory"), WAYS.values(), ids=WAYS)
def test_a_training_learns_within_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data, memory):
    leave_out_pictures(monkeypatch)
    result = train(config_of(tmp_path, memory, **data))

    assert result.last_loss < result.first_loss
    assert result.validation_loss is not None
    assert result.measured_peak_bytes <= result.predicted_peak_bytes + 1024
    assert result.budget_bytes is None or result.predicted_peak_bytes <= result.budget_bytes
    if data.get("packing"):
        assert result.measured_peak_bytes > 0.97 * result.predicted_peak_bytes  # which is for the longest documents


@pytest.mark.parametrize("data", [{"packing": "best_fit"}, {"buckets": True}, {}], ids=str)
def test_the_data_of_any_step_is_reached_by_its_position(tmp_path: Path, data):
    config = config_of(tmp_path, {}, **data)
    prepared = prepare_data(config.data, config.model)
    whole = prepared.batches(8, seed=3)
    passed = [(whole.position, next(whole)) for _ in range(30)]
    for position, batch in passed[::7]:
        again = prepare_data(config.data, config.model).batches(8, seed=3, position=StreamPosition(**vars(position)))
        found = next(again)
        assert found.keys() == batch.keys()
        assert all(found[name].equal(batch[name]) for name in batch)


def test_the_note_says_how_full_the_rows_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave_out_pictures(monkeypatch)
    listener = Listener()
    train(config_of(tmp_path, {}, packing="best_fit"), ["training.max_steps=1"], reporter=listener)
    notes = [line for kind, line in listener.told if kind == "note"]
    assert any("rows of 32 tokens, packed by best fit, " in line and "% full, to train on" in line for line in notes)


def test_a_model_that_mixes_documents_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch):
    from tightfit.models.decoder import Decoder

    plain = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, input_ids, position_ids=None, **how: plain(self, input_ids))
    with pytest.raises(ModelError, match=r"data\.packing best_fit: in Decoder .* set data\.packing to none"):
        train(config_of(tmp_path, {}, packing="best_fit"))
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_the_keys_are_read_from_yaml_and_wrong_ones_are_refused_in_a_line(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("data: {packing: best_fit}\n")
    assert load_config(path).data.packing == "best_fit"
    path.write_text("data: {packing: tight}\n")
    with pytest.raises(ConfigError, match=r"data\.packing"):
        load_config(path)
    path.write_text("data: {packing: best_fit, buckets: true}\n")
    with pytest.raises(ConfigError, match="buckets and packing best_fit are both set"):
        load_config(path)


def test_packed_conversations_learn_the_answers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave_out_pictures(monkeypatch)
    drawn = random.Random(0)
    lines = []
    for _ in range(60):
        turns = [{"role": role, "content": " ".join(drawn.choices(WORDS, k=3))} for role in ("user", "assistant")]
        lines.append(json.dumps({"messages": turns}) + "\n")
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(lines))
    config = settings(
        tmp_path,
        data={"source": str(source), "sequence_length": 96, "packing": "best_fit"},
        model={"max_position_embeddings": 96},
    )
    batch = next(prepare_data(config.data, config.model).batches(2))
    learnt = (batch["labels"] != -100).float().mean()
    assert 0 < learnt < 0.8
    assert (batch["position_ids"] == 0).sum() > 2
    train(config, ["training.max_steps=2", "training.batch_size=2"])
    assert len(metrics(tmp_path)) == 2


@pytest.mark.keeps("batches-position-reached-without")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", [{"packing": "best_fit"}, {"buckets": True}], ids=str)
def test_a_training_that_is_resumed_twice_within_an_epoch_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data
):
    leave_out_pictures(monkeypatch)
    leave_out_predictions(monkeypatch)
    ways = {"whole": [9], "resumed": [2, 5, 9]}
    for name, stops in ways.items():
        (tmp_path / name).mkdir()
        config = config_of(tmp_path / name, {}, **data)
        for number, stop in enumerate(stops):
            steps = [f"training.max_steps={stop}", "training.schedule=constant", "checkpoint.every_steps=1"]
            train(config, steps, resume=number > 0)
    whole, resumed = ((tmp_path / name / "run" / "model.safetensors").read_bytes() for name in ways)
    assert whole == resumed
    assert [line["loss"] for line in metrics(tmp_path / "whole")] == [
        line["loss"] for line in metrics(tmp_path / "resumed")
    ]


class AttentionCalls(TorchDispatchMode):
    """Counts how often the kernel of attention runs forward, in backward too."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))

    @classmethod
    def of_step(cls, model, batch):
        with cls() as calls:
            model_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)
        return calls.found


@pytest.mark.slow  # a training for each
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings(f"error::{OtherOperators.__module__}.OtherOperators")
@pytest.mark.parametrize("order", [1, -1])  # the first batch is compared with the plan's
@pytest.mark.parametrize("planned", [0, 2])
def test_a_plan_that_keeps_attention_keeps_it_for_other_numbers_of_documents(planned, order):
    rows = [[[LENGTH]] * 2, [[LENGTH // 2] * 2] * 2, [[LENGTH // 8] * 8, [LENGTH // 4] * 4]]
    batches = [packed([[document(n, seed) for seed, n in enumerate(row)] for row in each]) for each in rows]
    model = decoder()
    plan = tightfit.plan(model, batches[planned], "0.9x", levers="exact")
    assert any(choice.action == "operators" for choice in plan.choices)
    with plan.apply(model):
        for batch, documents in list(zip(batches, (2, 4, 12), strict=True))[::order]:
            assert AttentionCalls.of_step(model, batch) == len(model.layers) * documents
