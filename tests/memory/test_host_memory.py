"""The host's memory of a training: its prediction by arithmetic, by what processes really take, and its budget."""

import importlib
import json
import mmap
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import tightfit
from adapted_blocks import built, of_batch
from command_line import tightfit as run_command
from tightfit.errors import CannotFit
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner import host
from tightfit.planner.records import HostMemory

ROOT = Path(__file__).resolve().parents[2]
BATCH = tightfit.TokenBatch(4, 32, 280)
PAGE = mmap.PAGESIZE


@pytest.fixture
def model():
    return Decoder(DecoderConfig(hidden_size=48, num_layers=2, num_heads=2, vocab_size=280)).to(torch.bfloat16)


def rounded(nbytes: int) -> int:
    """To a power of two, as PyTorch's pinned memory is."""
    return 1 << (nbytes - 1).bit_length()


@pytest.mark.keeps("host-peak-is-predicted")
def test_an_offloading_optimizer_has_masters_and_gradients_in_pinned_memory_and_moments_beside(model):
    found = tightfit.estimate(model, BATCH, optimizer="offloaded_adamw", device="rtx4090")
    sizes = [parameter.numel() for parameter in model.parameters()]
    masters, moments, counts = sum(rounded(4 * n) for n in sizes), 8 * sum(sizes), 4 * len(sizes)
    assert found.host_by_category["optimizer states"] == masters + moments + counts
    assert found.host_by_category["gradients"] == sum(rounded(2 * n) for n in sizes)
    assert found.host_peak_bytes == sum(found.host_by_category.values())
    assert found.host.process > 50e6


@pytest.mark.keeps("host-peak-is-predicted")
def test_weights_on_their_way_to_a_card_count_where_nothing_stays_on_the_host(model):
    found = tightfit.estimate(model, BATCH, device="rtx4090")
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert found.host_by_category == {"process": found.host.process, "weights while loading": weights}


def test_on_a_cpu_the_host_has_the_process_and_the_device_peak(model):
    found = tightfit.estimate(model, BATCH, device="cpu")
    assert found.host_peak_bytes == found.host.process + found.peak_bytes


def test_what_a_plan_offloads_is_in_the_host(model):
    batch = tightfit.TokenBatch(64, 64, 280)
    plan = tightfit.plan(model, batch, "0.95x", device="rtx4090", levers=["offload"], optimizer="sgd")
    (lever,) = plan.levers
    assert plan.host_by_category["activations"] == lever.bytes > 0


@pytest.mark.keeps("streamed-peak")
def test_streamed_weights_are_in_the_hosts_memory_where_a_card_runs_their_blocks():
    model, x = built()
    plain = tightfit.estimate(model, {"x": x.detach()}, loss=of_batch, device="rtx4090")
    with tightfit.stream(model, "layers.*"):
        found = tightfit.estimate(model, {"x": x.detach()}, loss=of_batch, device="rtx4090")
        on_cpu = tightfit.estimate(model, {"x": x.detach()}, loss=of_batch, device="cpu")
    frozen = [p for layer in model["layers"] for p in layer.parameters() if not p.requires_grad and p.nbytes >= 512]
    assert "parameters" not in plain.host.by_category(plain.step_figures.host_by_category)
    assert found.step_figures.host_by_category["parameters"] == sum(-(-p.nbytes // PAGE) * PAGE for p in frozen)
    assert on_cpu.host_by_category["parameters"] == on_cpu.by_category["parameters"]  # the others are in a file


@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
@pytest.mark.keeps("host-budget-is-kept")
def test_a_budget_below_the_process_is_refused_in_one_line(model, device):
    with pytest.raises(CannotFit, match=r"^1.00 MiB of host memory cannot fit: .*: raise host_budget") as refused:
        tightfit.plan(model, BATCH, "10GiB", device=device, host_budget="1MiB")
    assert "\n" not in str(refused.value)
    assert refused.value.least_bytes > 50e6


@pytest.mark.slow  # two plans
@pytest.mark.keeps("host-budget-is-kept")
def test_on_a_cpu_the_step_gets_what_the_process_leaves(monkeypatch):
    monkeypatch.setattr(host, "process_bytes", lambda held, tidied: 1 << 28)  # a real one shrinks and grows meanwhile
    model = Decoder(DecoderConfig(hidden_size=128, num_layers=4, num_heads=4, vocab_size=512))
    batch = tightfit.TokenBatch(8, 256, 512)
    plain = tightfit.plan(model, batch, "10GiB", device="cpu")
    assert not plain.levers
    room = plain.host.process + plain.peak_bytes * 3 // 4
    found = tightfit.plan(model, batch, "10GiB", device="cpu", host_budget=room)
    assert found.levers
    assert found.host_peak_bytes <= room


def test_the_highest_point_is_while_loading_or_in_a_step():
    host = HostMemory(process=100, loaded=50, copies=7)
    assert host.by_category({"gradients": 30, "inputs": 0}) == {"process": 100, "weights while loading": 50}
    assert host.by_category({"gradients": 60}) == {"process": 100, "gradients": 60, "checkpoint": 7}


@pytest.mark.slow  # searches recipes twice
def test_recipes_say_their_host_peak_and_keep_to_a_budget():
    narrow = ("--optimizer", "sgd", "--dtype", "fp32", "--json")
    asked = ("fit", "--model", "cpu8", "--seq-len", "64", "--device", "rtx4090", *narrow)
    found = json.loads(run_command(*asked).out)["recipes"]
    fitting = [row["host_peak_bytes"] for row in found if row["fits"]]
    assert min(fitting) > 10e6
    refused = run_command(*asked, "--host-budget", "1MiB")
    assert refused.code == 3
    assert "host memory cannot fit" in refused.err


@pytest.mark.keeps("host-peak-is-predicted")
@pytest.mark.sampled(1)  # each is a training in a process of its own
@pytest.mark.parametrize("case", [{}, {"optimizer": "sgd", "micro_batches": 2}, {"budget": "0.7x"}], ids=str)
def test_a_training_takes_what_was_predicted(case, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("host_memory")
    shape = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 1024}
    asked = json.dumps({"model": shape, "batch": 4, **case})
    command = [sys.executable, str(ROOT / "benchmarks" / "host_memory.py"), "--case", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert module.is_within(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.keeps("host-peak-is-predicted")
def test_a_training_on_a_card_has_the_libraries_of_cuda_too(model, monkeypatch):
    """By the figures that `benchmarks/libraries.py` wrote, unless this process has started CUDA already."""
    figures = tomllib.loads((ROOT / "src" / "tightfit" / "devices" / "libraries.toml").read_text())
    results = json.loads((ROOT / "benchmarks" / "results" / "libraries.json").read_text())
    rows = results[figures["measured_on"]]["rows"]
    assert figures["steps_bytes"] == max(row["steps_bytes"] - row["predicting_bytes"] for row in rows.values())
    monkeypatch.setattr(host, "process_bytes", lambda held, tidied: 1 << 28)
    here, with_cuda = tightfit.estimate(model, BATCH, device="cpu"), tightfit.estimate(model, BATCH, device="rtx4090")
    build = figures["build_bytes"] if torch.version.cuda is None else 0
    assert here.host.process == 1 << 28
    assert with_cuda.host.process == (1 << 28) + figures["steps_bytes"] + build > here.host.process
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert tightfit.estimate(model, BATCH, device="rtx4090").host.process == 1 << 28
