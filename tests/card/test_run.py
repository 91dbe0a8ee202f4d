"""`tightfit run`: scripts, unchanged, on cards that are not there."""

import asyncio
import dataclasses
import json
import subprocess
import sys

import mcp
import pytest
import torch

import tightfit
from tightfit.cli.assistants import server
from tightfit.devices.nullcard.card import card_of
from tightfit.errors import DeviceError, InputError, TightfitError
from tightfit.training.monitoring.cards.command import _of_training, _result
from tightfit.training.monitoring.cards.records import RankOfRun, RefusedBytes

TRAINING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    loss = model(torch.randn(ROWS, 256).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
    print("peak", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
"""
TRIES_AGAIN = """
for rows in (3 * 2**20, 2**10):
    try:
        train(rows)
        break
    except torch.OutOfMemoryError:
        pass
    print("alive", sum(issubclass(type(thing), nn.Linear) for thing in gc.get_objects()), flush=True)
"""
ONE_AFTER_THE_OTHER = """
for rows in (2048, 4096):
    train(rows)
"""
ENDS_LATE = """
import gc, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.itself = nn.Linear(64, 64), [self]

    def forward(self, x):
        gc.collect()
        return self.layer(x)

gc.disable()
for model in range(2):
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.randn(8, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def in_a_function(rest):
    lines = TRAINING.splitlines()
    function = [*lines[:4], "def train(rows):", *(f"    {line}" for line in lines[4:])]
    return "import gc\n" + "\n".join(function).replace("ROWS", "rows") + rest


def script(folder, rows=4096, text=TRAINING):
    path = folder / "train.py"
    path.write_text(text.replace("ROWS", str(rows)))
    return [sys.executable, str(path)]


def printed(captured, name):
    return [line.split()[1:] for line in captured.splitlines() if line.startswith(name)]


@pytest.mark.keeps("tightfit-run-says-script")
def test_the_peak_is_the_allocators_own_and_the_script_reads_it_too(tmp_path, capfd):
    run = tightfit.run(script(tmp_path), device="rtx4090", steps=3)
    said = printed(capfd.readouterr().out, "peak")
    assert len(said) == len(run.steps) == 3, "ended after three steps"
    assert [run.peak_bytes, run.reserved_bytes] == [int(figure) for figure in said[-1]]
    assert run.fits
    assert run.exit_code == 0
    (rank,) = run.ranks
    for shares in (rank.by_category, rank.by_module, rank.by_line):
        assert sum(shares.values()) == run.peak_bytes
    weights = sum(p.nbytes for p in torch.nn.Linear(256, 1024).parameters())
    weights += sum(p.nbytes for p in torch.nn.Linear(1024, 256).parameters())
    assert run.by_category["parameters"] == weights
    assert run.by_category["optimizer states"] == 2 * weights  # the counts of steps are on the host
    assert 0 < run.by_category["gradients"] <= weights  # the peak is in backward
    assert run.by_category["inputs"] == 4096 * 256 * 4
    assert {"0", "1"} <= set(rank.by_module)
    assert any(line.startswith("train.py:8 ") for line in rank.by_line)
    assert run.steps[0].phase_peaks.keys() == {"forward", "backward", "optimizer"}
    (read,) = (value for value in run.read_values if "loss.item()" in value.line)
    assert read.at.startswith("train.py:12 ")
    assert read.count == 3


def test_on_the_card_of_this_machine_the_script_runs_as_it_is(tmp_path, capfd):
    """Here that is the null card of the tests, whose figures are those that a run on a null card of its name finds."""
    run = tightfit.run(script(tmp_path), device="cuda", steps=3)
    said = printed(capfd.readouterr().out, "peak")
    assert [run.peak_bytes, run.reserved_bytes] == [int(figure) for figure in said[-1]]
    assert run.here
    assert run.device == torch.cuda.get_device_name()
    assert run.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert not run.read_values, "all numbers are true there"
    there = tightfit.run(script(tmp_path), device="rtx4090", steps=3)
    assert [s.peak_bytes for s in run.steps] == [s.peak_bytes for s in there.steps]
    assert "of this machine" in str(run)
    assert "not here" not in str(run)
    assert "not here" in str(there)


@pytest.mark.parametrize("wrong", [{"memory": "8GiB"}, {"count": 2}, {"values": True}, {"load": True}])
def test_the_card_of_this_machine_is_what_it_is(tmp_path, wrong):
    with pytest.raises(InputError, match="leave memory, count, values and load out"):
        tightfit.run(script(tmp_path), device="cuda", **wrong)


def test_a_machine_without_a_card_has_none(tmp_path, monkeypatch):
    for name in ("LD_PRELOAD", "TIGHTFIT_NULLCARD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="no card that PyTorch can use"):
        tightfit.run(script(tmp_path), device="cuda")


@pytest.mark.keeps("tightfit-run-says-script")
def test_what_the_card_has_no_room_for_does_not_fit(tmp_path, capfd):
    run = tightfit.run(script(tmp_path, rows=2**20), device="rtx4090", memory="4GiB")
    assert run.fits is False
    assert run.out_of_memory.asked_bytes == 2**20 * 1024 * 4
    assert (run.out_of_memory.step, run.out_of_memory.phase) == (1, "forward")
    assert run.out_of_memory.at.startswith("train.py:8 ")
    assert "CUDA out of memory" in run.out_of_memory.message
    assert run.exit_code == 1
    text = str(run)
    assert "Does not fit: in step 1, forward, at train.py:8" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.keeps("tightfit-run-says-script")
def test_the_line_in_backward_is_the_scripts_own(tmp_path):
    """Not that of the engine, which is ours on a null card."""
    run = tightfit.run(script(tmp_path, rows=2**20), device="rtx4090", memory="14GiB", quiet=True)
    assert run.out_of_memory.phase == "backward"
    assert run.out_of_memory.at.startswith("train.py:9 ")


@pytest.mark.keeps("tightfit-run-says-script")
def test_a_script_that_tries_again_with_less_fits(tmp_path, capfd):
    run = tightfit.run(script(tmp_path, text=in_a_function(TRIES_AGAIN)), device="rtx4090", memory="4GiB", steps=3)
    assert printed(capfd.readouterr().out, "alive") == [["0"]], "the first try's model takes no memory any more"
    assert run.fits is True
    assert len(run.steps) == 3
    assert run.by_category["parameters"] == (2 * 256 * 1024 + 1024 + 256) * 4
    assert run.out_of_memory is None
    (caught,) = run.ranks[0].caught
    assert caught.asked_bytes == 3 * 2**20 * 1024 * 4
    assert caught.at.startswith("train.py:")
    assert run.notes == (f"The card had no room once at {caught.at} (12.00 GiB more); the command went on.",)


@pytest.mark.keeps("tightfit-run-says-script")
def test_models_that_are_trained_one_after_the_other_are_all_watched(tmp_path, capfd):
    run = tightfit.run(script(tmp_path, text=in_a_function(ONE_AFTER_THE_OTHER)), device="rtx4090", steps=0)
    assert len(run.steps) == 10
    said = [int(figure) for figure, _ in printed(capfd.readouterr().out, "peak")]
    assert run.peak_bytes == max(said) == said[-1]
    assert run.by_category["parameters"] == (2 * 256 * 1024 + 1024 + 256) * 4
    assert run.by_category["optimizer states"] == 2 * run.by_category["parameters"]
    assert {"0", "1"} <= set(run.ranks[0].by_module)


def test_a_model_that_ends_within_the_next_ones_call_is_followed_by_it(tmp_path):
    """Its end is no moment to look for a model, and the optimizer's step, the next one, is within PyTorch's hooks."""
    run = tightfit.run(script(tmp_path, text=ENDS_LATE), device="rtx4090", steps=0, quiet=True)
    assert run.exit_code == 0
    assert len(run.steps) == 3 + 2


def test_true_values_are_those_of_the_cpu(tmp_path, capfd):
    text = "import importlib.util\nimportlib.util.find_spec('torch')  # as many libraries ask\n"
    text += "import torch\nx = torch.arange(5.0).cuda()\nprint('sum', (x * x).sum().item())\n"
    run = tightfit.run(script(tmp_path, text=text), device="rtx4090", values=True)
    assert printed(capfd.readouterr().out, "sum") == [["30.0"]]
    assert not run.read_values
    assert run.fits
    assert not run.steps


@pytest.mark.keeps("tightfit-run-says-script")
def test_the_command_line_speaks_by_its_exit_code_and_a_last_line(tmp_path):
    def ended(*words, text=TRAINING, rows=64):
        command = [sys.executable, "-m", "tightfit", "run", "--device", "rtx4090", *words, "--"]
        return subprocess.run([*command, *script(tmp_path, rows, text)], capture_output=True, text=True)

    fits = ended("--json", "--html", str(tmp_path / "page.html"), "--snapshot", str(tmp_path / "memory.pickle"))
    assert fits.returncode == 0, fits.stderr
    found = json.loads(fits.stdout.splitlines()[-1])
    wanted = {"fits", "device", "peak_bytes", "reserved_bytes", "host_peak_bytes", "by_category", "steps", "ranks"}
    assert wanted | {"out_of_memory", "read_values"} <= found.keys()
    assert {"peak_bytes", "reserved_bytes", "phase", "at"} <= found["steps"][0].keys()
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert tightfit.diagnose(_snapshot(tmp_path / "memory.pickle")).peak_bytes
    small = ended("--memory", "2GiB", rows=2**19)
    assert small.returncode == 3
    assert "2.00 GiB more were asked for" in small.stderr
    assert "requested" in small.stderr, "what the doctor says"
    assert ended(text="import torch; torch.ones(3).cuda(); raise SystemExit(7)").returncode == 7
    killed = "import os, signal, torch; torch.ones(3).cuda(); os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(text=killed).returncode == 128 + 9


def test_a_process_that_runs_out_of_memory_before_it_trains_is_not_left_out():
    fields = {field.name: 0 for field in dataclasses.fields(RankOfRun)}
    fields |= {name: {} for name in ("by_category", "by_module", "by_line")}
    fields |= dict.fromkeys(("steps", "read_values", "curve", "caught"), ())
    trains = RankOfRun(**{**fields, "model": "Net", "out_of_memory": None})
    loads = RankOfRun(**{**fields, "model": "", "out_of_memory": RefusedBytes(1, "", 0, "before the first step")})
    found = _result(card_of("t4"), ["x"], _of_training((trains, loads)), 1, False, "")
    assert found.fits is False


def _snapshot(path):
    from tightfit.memory.snapshot import read_snapshot

    return read_snapshot(path)


def test_a_command_that_hangs_is_ended_and_one_without_cuda_is_said(tmp_path):
    hangs = tightfit.run(script(tmp_path, text="import time\ntime.sleep(60)"), device="t4", timeout=1)
    assert (hangs.fits, hangs.exit_code) == (None, 124)
    assert "ended after 1 seconds" in hangs.notes[0]
    assert "took no memory of a card" in hangs.notes[1]


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (["python"], {"device": "nocard"}, "no card of the list"),
        (["python"], {"device": "rtx4090", "memory": "300MiB"}, "CUDA itself takes 512.00 MiB"),
        (["python"], {"device": "rtx4090", "count": 0}, "count is 0"),
        (["python"], {"device": "rtx4090", "steps": -1}, "steps is -1"),
        (["python"], {"device": "rtx4090", "timeout": 0}, "timeout is 0"),
        (["python"], {"device": "rtx4090", "snapshot": "/nowhere/at/all"}, "cannot be written"),
        (["no-such-program"], {"device": "rtx4090"}, "there is no such program"),
        ([], {"device": "rtx4090"}, "no command"),
    ],
)
def test_misuse_is_one_line(words, settings, said):
    with pytest.raises(TightfitError, match=said):
        tightfit.run(words, **settings)


def test_a_card_comes_into_a_process_before_torch_and_not_after():
    with pytest.raises(InputError, match="this process has PyTorch already"), tightfit.card("rtx4090"):
        pass
    code = "import tightfit\nwith tightfit.card('t4'):\n    import torch\n    print(torch.cuda.get_device_name())"
    outside = {"PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=outside)
    assert ran.stdout == "NVIDIA T4\n", ran.stderr


@pytest.mark.keeps("tightfit-run-says-script")
@pytest.mark.slow  # three processes that import torch, some 15 seconds
def test_each_rank_of_torchrun_has_its_row(tmp_path):
    text = TRAINING.replace("import torch\n", "import torch, torch.distributed as dist\n", 1)
    text = text.replace(
        "model = ", "dist.init_process_group('nccl')\nr = dist.get_rank()\ntorch.cuda.set_device(r)\nmodel = ", 1
    )
    text = text.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = ", 1)
    text = text.replace("ROWS", "4096 * (r + 1)")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script(tmp_path, text=text)[1]]
    run = tightfit.run(words, device="rtx4090", count=2, quiet=True)
    assert run.fits
    assert [(rank.rank, rank.card, len(rank.steps)) for rank in run.ranks] == [(0, 0, 3), (1, 1, 3)]
    assert run.ranks[0].peak_bytes < run.ranks[1].peak_bytes == run.peak_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TRAINING.replace("ROWS", "4096"), ["Fits", "peak ", "RTX 4090"]),
        (TRAINING.replace("torch.randn(ROWS", "torch.empty(2**23"), ["Does not fit", "32.00 GiB"]),
        ("raise ValueError('of the script')", ["ValueError: of the script"]),
    ],
    ids=["fits", "does not fit", "fails"],
)
def test_an_assistant_runs_a_script_by_the_protocols_own_client(text, said):
    async def asked():
        async with mcp.Client(server(allow_run=True)) as client:
            return await client.call_tool("run", {"script": text, "device": "rtx4090", "steps": 2})

    found = asyncio.run(asked())
    answer = "\n".join(part.text for part in found.content)
    assert not found.is_error, answer
    assert [each for each in said if each not in answer] == [], answer
