"""What stood in an earlier version stands: its names, options, keys and fields, and what it wrote (`tests/records`)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tightfit
from promises import promised
from quick_trainings import leave_out_pictures
from tightfit.training.api import train
from tightfit.training.config import parse_config

RECORDS = Path(__file__).parent / "records"
CORPUS = "".join(f"The house number {count} of the street has {count % 7} doors.\n" for count in range(120))
SETTINGS: dict[str, Any] = {
    "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 280, "max_position_embeddings": 16},
    "data": {"source": "corpus.txt", "sequence_length": 16, "vocab_size": 280, "validation_fraction": 0.1},
    "training": {"max_steps": 4, "batch_size": 4, "learning_rate": 1e-2, "device": "cpu"},
    "checkpoint": {"every_steps": 2},
    "output": {"folder": "run"},
}
SINCE = ("host", "host_peak_bytes", "host_by_category")  # fields that plans have had since
RECORDED = json.loads((RECORDS / "promises.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def now():
    return promised()


def test_every_public_name_takes_what_it_took(now):
    for name, signatures in RECORDED["python"].items():
        for what, parameters in signatures.items():
            takes = now["python"][name][what]
            # An argument that had to be given may have a default since, where something else may be in its place.
            missing = [each for each in parameters if each not in takes and f"{each}=None" not in takes]
            assert not missing, f"tightfit.{name} {what}: {missing}"


def test_every_option_of_every_command_is_there(now):
    for command, options in RECORDED["commands"].items():
        assert not set(options) - set(now["commands"][command]), command


def test_every_key_of_the_configuration_is_there(now):
    assert not set(RECORDED["keys"]) - set(now["keys"])


@pytest.mark.parametrize("command", RECORDED["json"])
def test_every_field_of_an_answer_is_there(now, command):
    missing = set(RECORDED["json"][command]) - set(now["json"][command])
    assert not {
        field for field in missing if field.removesuffix("[]") not in now["json"][command]
    }  # a list may be empty


def test_a_plan_of_an_earlier_version_loads():
    plan = tightfit.Plan.from_json(RECORDS / "plan.json")
    now = json.loads(json.dumps(plan.to_dict()))
    for part in (now, now["plain"], now["planned"]):
        for field in SINCE:
            part.pop(field, None)
    assert now == json.loads((RECORDS / "plan.json").read_text("utf-8"))
    assert plan.levers
    assert plan.peak_bytes < plan.plain_peak_bytes


def test_a_training_of_an_earlier_version_goes_on(tmp_path, monkeypatch):
    leave_out_pictures(monkeypatch)
    """`tests/records/run` was stopped after two of four steps by the version that `promises.json` is of."""
    shutil.copytree(RECORDS / "run", tmp_path / "run")
    (tmp_path / "corpus.txt").write_text(CORPUS)
    monkeypatch.chdir(tmp_path)
    result = train(parse_config(SETTINGS), resume=True)
    straight = train(parse_config({**SETTINGS, "output": {"folder": "straight"}}))
    assert result.steps == straight.steps == SETTINGS["training"]["max_steps"]
    went_on, whole = (load_file(folder / "model.safetensors") for folder in (Path("run"), Path("straight")))
    assert went_on.keys() == whole.keys()
    assert all(torch.allclose(went_on[name], whole[name], atol=1e-4) for name in whole)
