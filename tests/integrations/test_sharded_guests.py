"""Guests whose model FSDP2 has sharded: one plan for all ranks, its peak, and the training of the ranks without it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter of allocations is compiled by gcc"),
]
ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "integrations"]
SCALARS = 100  # bytes of single numbers of the loop, such as a loss divided by the batches that it accumulates
LOADER = 0.007  # of the peak: a Trainer's loader holds three batches ahead, which no plan knows of
GUESTS = ["accelerate", "keeping", "mixed", "tied", "trainer", "frugal trainer"]
GUESTS += ["lightning", "mixed lightning", "growing lightning"]


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    library = tmp_path_factory.mktemp("counter") / "allocations.so"
    source = ROOT / "benchmarks" / "allocations.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


def run(counter, guest, budget):
    script = PATHS[-1] / "sharded_guests.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), guest, budget]
    setting = {"PYTHONPATH": ":".join(map(str, PATHS)), "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(counter)}
    return subprocess.run(words, capture_output=True, text=True, timeout=580, env=os.environ | setting)


def trained(counter, guest, budget):
    """What each rank says, in their order."""
    ended = run(counter, guest, budget)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]
    rows.sort(key=lambda row: row["rank"])
    assert [row["rank"] for row in rows] == [0, 1]
    return rows


# Slow: two processes import the guest and train, without a plan and with one, half a minute of processor time for each.
@pytest.mark.keeps("guests-whose-model-fsdp2")
@pytest.mark.slow
@pytest.mark.parametrize("guest", GUESTS)
def test_sharded_ranks_of_a_guest_train_what_they_train_without_a_budget(counter, guest):
    expected = trained(counter, guest, "none")
    rows = trained(counter, guest, "0.75x")
    for plain, row in zip(expected, rows, strict=True):
        assert (row["losses"], row["weights"]) == (plain["losses"], plain["weights"])
        assert row["units"] == plain["units"] > 1
        assert "recompute" in row["levers"]
        assert row["ranks"] == [2, "fsdp2"]
        assert row["frees"] == (guest != "keeping")
        slack = LOADER * row["predicted"] if "trainer" in guest else SCALARS
        assert 0 <= row["measured"] - row["predicted"] <= slack, row
        assert row["predicted"] <= row["budget"] < plain["measured"]
        assert row["measured"] <= row["budget"] + slack
    assert 0 <= expected[0]["measured"] - rows[0]["plain"] <= slack
    assert rows[0]["hash"] == rows[1]["hash"]
    if "lightning" not in guest:  # whose model has rows that divide
        assert rows[1]["predicted"] < rows[0]["predicted"]


# Slow: as above.
@pytest.mark.keeps("guests-whose-model-fsdp2")
@pytest.mark.slow
def test_levers_that_round_run_on_shards_too(counter):
    expected = trained(counter, "rounding", "none")
    rows = trained(counter, "rounding", "0.8x")
    for plain, row in zip(expected, rows, strict=True):
        assert row["levers"] == ["chunked_loss"]
        assert row["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert row["measured"] <= row["predicted"] + SCALARS  # planned for a batch with one ignored label
        assert row["predicted"] <= row["budget"]


# Slow: two processes import the guest.
@pytest.mark.keeps("guests-whose-model-fsdp2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("guest", "line"),
    [
        ("accelerate", "cannot fit: the least is"),
        ("tensor lightning", r"LeverError: MemoryBudget: .* is sharded by another engine than FSDP2"),
        ("recovering lightning", "LeverError: MemoryBudget: recover=True repeats a step"),
        ("on the host", r"LeverError: apply_budget: .* has its shards on the host \(CPUOffloadPolicy\)"),
        ("recovering", "LeverError: MemoryBudget: recover=True repeats a step"),
        ("verifying", "LeverError: MemoryBudget: verify=True compares whole models"),
    ],
)
def test_what_is_refused_is_one_line_of_one_rank(counter, guest, line):
    ended = run(counter, guest, "1KiB" if guest == "accelerate" else "0.75x")
    assert ended.returncode != 0
    said = [each for each in ended.stderr.splitlines() if "tightfit.errors" in each]
    assert len(said) == 1, ended.stderr
    assert re.search(line, said[0]), said
