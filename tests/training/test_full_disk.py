"""A disk without room for the weights: found before the first step, and survived at the end."""

import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from real_trainings import COMMAND, environment, written
from tiny_training import Listener, settings
from torch import nn

from quick_trainings import leave_out_pictures
from tightfit.errors import OutputError
from tightfit.models.adapters import ADAPTER_WEIGHTS
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.saving import WEIGHTS_FILE, load_model, save_model, saved_bytes
from tightfit.training.api import train
from tightfit.training.storage import METRICS, RunFolder
from tiny_adapters import adapted, saved_llama

WIDE = {"hidden_size": 256, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 32}


def own_mounts() -> bool:
    """Whether a process may have file systems of its own, in a name space that ends with it."""
    tried = ("unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


def on_a_small_disk(folder: Path, config: Path, megabytes: int, meanwhile: str = "") -> subprocess.CompletedProcess:
    """`tightfit train` where `folder` is a disk of that size, on which something else is written after two steps."""
    script = folder.parent / "meanwhile.py"
    script.write_text(
        "from tightfit.cli.progress import ProgressReporter\n"
        "def on_step(self, metrics):\n"
        f"    if metrics.step == 2: {meanwhile or 'pass'}\n"
        "ProgressReporter.on_step = on_step\n"
        "from tightfit.cli import main; main()\n"
    )
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {folder}"
    train = f"{sys.executable} {script} train {config}; code=$?; ls -A {folder}/run >&2; exit $code"
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f"{mount} && cd {folder} && {train}"],
        capture_output=True, text=True, env=environment(HOME=str(folder), TMPDIR=str(folder.parent)),
    )  # fmt: skip


def only_error(done: subprocess.CompletedProcess) -> str:
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "Traceback" not in done.stderr
    return error


@pytest.mark.keeps("disk-too-small-reported")
def test_weights_that_find_no_room_are_kept_elsewhere_with_all_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    leave_out_pictures(monkeypatch)
    write_model, elsewhere = RunFolder.write_model, tmp_path / "elsewhere"
    elsewhere.mkdir()

    def full(self: RunFolder, model: nn.Module) -> None:
        if self.path.parent != elsewhere:
            raise OutputError("no room")
        write_model(self, model)

    monkeypatch.setattr(RunFolder, "write_model", full)
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which is read once
    with pytest.raises(OutputError, match=r"^no room\. The weights are kept in ") as caught:
        train(settings(tmp_path))

    (kept,) = elsewhere.glob("tightfit-run-*")
    assert f"kept in {kept}: move them" in str(caught.value)
    load_model(kept)
    assert json.loads((kept / "result.json").read_text())["steps"] == 4
    assert [json.loads(line)["step"] for line in (kept / METRICS).read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.keeps("disk-too-small-reported")
@pytest.mark.slow  # an interpreter of its own
@pytest.mark.skipif(not own_mounts(), reason="no file systems of one's own here")
def test_a_disk_that_fills_up_meanwhile_leaves_the_weights_elsewhere(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    config = written(tmp_path, model=WIDE, output={"folder": str(disk / "run")})
    fills = f"""
        with open("{disk}/other", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)): pass
            except OSError: pass"""

    done = on_a_small_disk(disk, config, 24, fills)

    assert done.returncode == 2, done.stderr
    error = only_error(done)
    assert "No space left on device" in error
    (kept,) = tmp_path.glob("tightfit-run-*")
    assert f"The weights are kept in {kept}" in error
    load_model(kept)
    assert json.loads((kept / "result.json").read_text())["steps"] == 4
    assert [json.loads(line)["step"] for line in (kept / METRICS).read_text().splitlines()] == [1, 2, 3, 4]
    assert set(done.stderr.split(error)[1].split()) == {"config.yaml", METRICS, "tokenizer.json"}
    assert f"The run is in {kept}" in " ".join(done.stdout.split())


@pytest.mark.keeps("disk-too-small-reported")
@pytest.mark.slow  # an interpreter of its own
@pytest.mark.skipif(not own_mounts(), reason="no file systems of one's own here")
def test_a_disk_that_is_too_small_is_told_before_the_first_step(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()

    done = on_a_small_disk(disk, written(tmp_path, model=WIDE, output={"folder": str(disk / "run")}), 5)

    assert done.returncode == 2, done.stderr
    assert "MiB are free, and this training writes" in only_error(done)
    assert METRICS not in done.stderr


@pytest.mark.slow  # a second training in a process of its own
def test_where_no_file_may_be_as_large_as_the_weights_one_line_says_that_they_are_lost(tmp_path: Path):
    """A limit of the process holds in every folder, so that there is none to keep them in."""
    config = written(tmp_path, model=WIDE)
    limit = 1 << 20
    done = subprocess.run(
        [*COMMAND, str(config)], capture_output=True, text=True, env=environment(HOME=str(tmp_path)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)), cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 2, done.stderr
    error = only_error(done)
    assert "File too large" in error
    assert "they are lost" in error
    assert not any(tmp_path.rglob("*.safetensors"))
    assert not any(tmp_path.glob("tightfit-*"))


def test_what_a_training_needs_is_checked_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    listener = Listener()
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 100_000))

    with pytest.raises(OutputError, match=r"97.66 KiB are free, and this training writes .*make room"):
        train(settings(tmp_path), reporter=listener)

    assert not any(name in ("plan", "start", "step") for name, _ in listener.told)
    assert not (tmp_path / "run").exists()


def test_the_space_of_the_run_that_is_overwritten_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(tmp_path)
    folder.write(WEIGHTS_FILE, bytes(1 << 20))
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))

    folder.demand_room(1 << 20)
    with pytest.raises(OutputError, match="make room"):
        folder.demand_room((1 << 20) + (1 << 16))


def test_lines_that_find_no_room_wait_for_the_next_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    leave_out_pictures(monkeypatch)
    append, full = RunFolder.append, [2, 3]

    def sometimes_full(self, name, lines):
        if json.loads(lines[-1])["step"] in full:
            raise OutputError("no room")
        append(self, name, lines)

    monkeypatch.setattr(RunFolder, "append", sometimes_full)
    listener = Listener()
    train(settings(tmp_path), reporter=listener)

    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert [line for name, line in listener.told if name == "note" and "no room" in line] == [
        "no room; the training goes on, and the lines wait"
    ]


@pytest.mark.keeps("disk-too-small-reported")
def test_no_line_is_half_written(tmp_path: Path):
    """The file may not grow beyond so much: the second line finds room for a part of it only."""
    folder = RunFolder(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.append(METRICS, ["x" * 600])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OutputError, match="File too large: make room"):
            folder.append(METRICS, ["y" * 600])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert (tmp_path / METRICS).read_text() == "x" * 600 + "\n"


@pytest.mark.parametrize("ties", [False, True])
def test_the_bytes_of_the_weights_are_known_before_they_are_written(tmp_path: Path, ties: bool):
    model = Decoder(DecoderConfig(hidden_size=64, num_layers=2, num_heads=2, vocab_size=300, tie_embeddings=ties))

    save_model(model, tmp_path)

    written = (tmp_path / WEIGHTS_FILE).stat().st_size
    assert written <= saved_bytes(model) <= written * 1.02


def test_of_adapters_only_their_own_bytes_count(tmp_path: Path):
    model = adapted(saved_llama(tmp_path / "base"))

    save_model(model, tmp_path)

    written = (tmp_path / ADAPTER_WEIGHTS).stat().st_size
    assert written <= saved_bytes(model) <= written * 1.1
