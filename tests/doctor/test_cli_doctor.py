"""`tightfit doctor FILE`."""

import json
import pickle

import pytest
import torch
from typer.testing import CliRunner

import tightfit as package
from command_line import tightfit
from memory_snapshots import snapshot
from tightfit.cli.app import app
from tiny import decoder, token_batch

LOG = """step 3 loss 2.1
Traceback (most recent call last):
  File "/home/u/train.py", line 88, in <module>
    loss.backward()
  File "/usr/lib/python3.12/site-packages/torch/autograd/graph.py", line 823, in _engine_run_backward
    return Variable._execution_engine.run_backward(  # Calls into the C++ engine to run the backward pass
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 9.00 MiB of \
which 512.00 KiB is free. Of the allocated memory 7.00 MiB is allocated by PyTorch, and 1.00 MiB is reserved by \
PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF
"""
DECODER = ("--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


def test_options_of_a_step_without_a_model_are_not_passed_over(log):
    assert "nothing to ask about: give a CONFIG, or --model" in tightfit("doctor", log, "--batch-size", 4).error


def test_a_log_tells_phase_and_line_and_which_command_tells_more(log):
    outcome = tightfit("doctor", log)
    assert outcome.code == 0
    assert "2.00 MiB were requested, in backward" in outcome.out
    assert "Its traceback ends at train.py:88 <module>" in outcome.out
    assert "tightfit doctor FILE CONFIG, or --model" in outcome.out


@pytest.mark.slow  # every remedy is priced
def test_with_a_model_remedies_have_a_price(log):
    raw = json.loads(tightfit("doctor", log, *DECODER, "--json").out)
    assert raw["expected_bytes"] == json.loads(tightfit("estimate", *DECODER, "--json").out)["peak_bytes"]
    names = [remedy["name"] for remedy in raw["remedies"]]
    assert "recompute all 2 blocks" in names
    assert all(remedy["saved_bytes"] is not None for remedy in raw["remedies"])


@pytest.mark.slow  # every remedy is priced
def test_the_table_of_remedies_keeps_within_the_terminal(log, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    lines = tightfit("doctor", log, *DECODER).out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("remedy")) :][:3]
    assert max(map(len, table)) <= 90


def test_stdin_is_read():
    result = CliRunner().invoke(app, ["doctor", "-"], input=LOG, prog_name="tightfit")
    assert "an out-of-memory error in stdin" in result.stdout


def test_a_plan_an_estimate_a_snapshot_and_a_record_are_known_by_their_content(tmp_path):
    model, batch = decoder(), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with package.monitor(model, optimizer) as watch:
        model(**batch).loss.backward()
        optimizer.step()
    watch.to_json(tmp_path / "record")
    package.estimate(model, batch).to_json(tmp_path / "estimate")
    package.plan(model, batch, "0.9x").to_json(tmp_path / "plan")
    (tmp_path / "pickle").write_bytes(pickle.dumps(snapshot()))
    (tmp_path / "json").write_text(json.dumps(snapshot()))
    said = {
        "record": "Diagnosis of a record of 1 steps of Decoder",
        "estimate": "Diagnosis of an estimate",
        "plan": "Diagnosis of a plan",
        "pickle": "Diagnosis of a CUDA memory snapshot",
        "json": "Diagnosis of a CUDA memory snapshot",
    }
    for name, first in said.items():
        assert tightfit("doctor", tmp_path / name).out.splitlines()[0] == first


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"all went well\n", "no out-of-memory error in it"),
        (b'{"a": 1}', "is JSON of another kind"),
        (b'{"kind": "tightfit memory record", "format": 1}', "is damaged, or of another version"),
        (b'{"planned": 1, "format": 1}', "is damaged, or of another version"),
        (b'{"segments": [{}]}', "is damaged, or of another version"),
        (b"\x80\x04broken", "not a CUDA memory snapshot"),
    ],
)
def test_what_cannot_be_diagnosed_is_told_in_one_line(tmp_path, content, said):
    path = tmp_path / "file"
    path.write_bytes(content)
    outcome = tightfit("doctor", path)
    assert outcome.code == 2
    assert said in outcome.error
    assert str(path) in outcome.error


def test_a_file_that_is_not_there_is_told(tmp_path):
    assert "cannot be read: No such file" in tightfit("doctor", tmp_path / "none").error
