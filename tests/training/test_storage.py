import json
import os
import stat
from pathlib import Path

import pytest
import torch

from tightfit.errors import OutputError
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.saving import load_model
from tightfit.training.result import StepMetrics
from tightfit.training.storage import METRICS, PLAN, RESULT, RunFolder


def decoder() -> Decoder:
    return Decoder(DecoderConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=11))


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path):
    folder = RunFolder(tmp_path / "runs" / "first")
    with folder.claimed(overwrite=False):
        folder.write(PLAN, b"{}")

    assert [path.name for path in folder.path.iterdir()] == [PLAN]


def test_a_training_that_writes_nothing_leaves_no_folder_where_there_was_none(tmp_path: Path):
    (tmp_path / "there").mkdir()
    with RunFolder(tmp_path / "there" / "runs" / "new").claimed(overwrite=False):
        pass
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(OutputError, match=r"file/run: cannot be written: .*choose another output.folder"):
        RunFolder(tmp_path / "file" / "run").claimed(overwrite=True).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)

    with pytest.raises(OutputError, match="cannot be written"):
        RunFolder(tmp_path).claimed(overwrite=True).__enter__()


def test_an_earlier_run_is_kept_unless_it_may_be_overwritten(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write(RESULT, "{}")

    with pytest.raises(OutputError, match=r"holds an earlier run \(result.json\).*output.overwrite"):
        folder.claimed(overwrite=False).__enter__()
    with folder.claimed(overwrite=True):
        pass

    assert (tmp_path / RESULT).exists()  # it goes only when the new run begins


def test_clearing_removes_an_earlier_run_and_nothing_else(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write(PLAN, "{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / ".part-killed").mkdir()  # a killed run's
    (tmp_path / ".part-killed" / "model.safetensors").touch()
    (tmp_path / "notes.txt").write_text("mine")

    folder.clear()

    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.keeps("run-folder-never-holds")
def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path)
    folder.write(RESULT, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"result.json: cannot be written: No space left"):
        folder.write(RESULT, "new")

    assert (tmp_path / RESULT).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [RESULT]


def test_whoever_reads_the_old_file_reads_it_whole(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write(RESULT, "old")

    with (tmp_path / RESULT).open() as reader:
        folder.write(RESULT, "new")

        assert reader.read() == "old"
    assert (tmp_path / RESULT).read_text() == "new"


def test_a_model_that_cannot_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails_half_way(model: object, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OutputError("the disk is full")

    monkeypatch.setattr("tightfit.training.storage.save_model", fails_half_way)
    with pytest.raises(OutputError, match="disk is full"):
        RunFolder(tmp_path).write_model(decoder())

    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_written_loads_with_equal_weights(tmp_path: Path):
    model = decoder()

    RunFolder(tmp_path).write_model(model)

    loaded = load_model(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.keeps("run-interrupted-resumed-ends")
def test_the_same_weights_are_the_same_bytes(tmp_path: Path):
    model = decoder()  # its head and its embedding are tied, so that the file names one of them in its metadata
    contents = set()
    for number in range(12):
        RunFolder(tmp_path / str(number)).path.mkdir()
        RunFolder(tmp_path / str(number)).write_model(model)
        contents.add((tmp_path / str(number) / "model.safetensors").read_bytes())

    assert len(contents) == 1


def test_others_may_read_the_weights_as_they_may_read_any_file(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write(RESULT, "{}")

    folder.write_model(decoder())

    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_metrics_are_one_json_object_a_line_with_null_for_what_is_not_finite(tmp_path: Path):
    folder = RunFolder(tmp_path)
    metrics = StepMetrics(1, float("inf"), 0.1, float("nan"), 64, 10.0, 6.4, 1000)

    folder.append(METRICS, [metrics.to_json()])
    folder.append(METRICS, [metrics.to_json()])

    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert len(lines) == 2
    assert (lines[0]["loss"], lines[0]["grad_norm"], lines[0]["tokens"]) == (None, None, 64)
