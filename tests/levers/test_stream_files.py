"""Trained weights that a CPU streams: their gradients and states are in the file of the weights."""

import contextlib
import gc
import io
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from tightfit.levers.stream.ring import Weight
from tightfit.levers.stream.tiers import FileTier
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.optim import OffloadedAdamW
from tightfit.training.loop import resident_tensors
from trained_blocks import BLOCKS, built, loss, of_batch

TESTS = Path(__file__).parents[1]


def streamed(model, **how):
    return tightfit.stream(model, "layers.*", trained=True, **how)


def steps(model, x, optimizer, count=1, parts=1):
    for _ in range(count):
        for _ in range(parts):
            loss(model, x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def rows(optimizer):
    """States by the place of their parameter."""
    return {f"{n}.{key}": value for n, each in optimizer.state_dict()["state"].items() for key, value in each.items()}


@pytest.mark.keeps("streamed-in-a-file", "streamed-peak")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_belongs_to_streamed_weights_takes_no_memory(dtype):
    model, x = built(dtype)
    how = {"loss": of_batch, "optimizer": "offloaded_adamw", "device": "cpu"}
    plain = tightfit.estimate(model, {"x": x}, **how)
    inside = [p for p in model["layers"].parameters() if p.nbytes >= 512]
    with streamed(model):
        optimizer = OffloadedAdamW(model.parameters())
        steps(model, x, optimizer, 2)
        states = rows(optimizer).values()
        away = sum(state.nbytes for state in states) - storage_bytes(states)
        assert away == sum(p.numel() for p in inside) * (8 if dtype == torch.float32 else 12)
        found = tightfit.estimate(model, {"x": x}, **how)
        measured = measured_peak(lambda: steps(model, x, optimizer), resident_tensors(model, optimizer, {"x": x}))
    block = sum(p.nbytes for p in inside) // BLOCKS
    there = plain.by_category["parameters"] + plain.by_category["gradients"]
    assert found.by_category["parameters"] <= plain.by_category["parameters"] - (BLOCKS - 1) * block
    assert found.by_category["gradients"] <= plain.by_category["gradients"] - (BLOCKS - 1) * block
    assert found.peak_bytes < there
    # Clipping is not in the estimate, and takes less than what is highest.
    assert measured == found.peak_bytes


@pytest.mark.keeps("streamed-in-a-file")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_the_resident_one_and_is_resumed(dtype):
    (plain, x), (model, _) = built(dtype), built(dtype)
    own, other = OffloadedAdamW(plain.parameters()), None
    steps(plain.eval(), x, own, 2, parts=2)
    with streamed(model):
        other = OffloadedAdamW(model.parameters())
        steps(model.eval(), x, other, 2, parts=2)
        torch.testing.assert_close(rows(other), rows(own), rtol=0, atol=0)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": other.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    torch.testing.assert_close(dict(saved["model"]), dict(plain.state_dict()), rtol=0, atol=0)
    steps(plain, x, own, 2)
    resumed, _ = built(dtype)
    with streamed(resumed):
        again = OffloadedAdamW(resumed.parameters())
        again.load_state_dict(saved["optimizer"])
        resumed.load_state_dict(saved["model"])
        states = rows(again).values()
        assert storage_bytes(states) < sum(state.nbytes for state in states) // 10, "they are in the file again"
        steps(resumed.eval(), x, again, 2)
        torch.testing.assert_close(rows(again), rows(own), rtol=0, atol=0)
        torch.testing.assert_close(dict(resumed.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


@pytest.mark.keeps("streamed-in-a-file")
def test_a_training_goes_on_when_its_folder_is_removed_and_leaves_nothing(tmp_path):
    (model, x), (plain, _) = built(), built()
    own = OffloadedAdamW(plain.parameters())
    torch.manual_seed(5)
    steps(plain, x, own, 3)
    place = tmp_path / "tier"
    place.mkdir()
    gc.collect()  # files of earlier tests
    files = len(os.listdir("/proc/self/fd"))
    handle = streamed(model, tier=place)
    optimizer = OffloadedAdamW(model.parameters())
    torch.manual_seed(5)
    steps(model, x, optimizer)
    assert list(place.iterdir()) == [], "the file has no name"
    assert len(os.listdir("/proc/self/fd")) == files + 1, "and is opened once, however many tensors are in it"
    assert str(place) in Path("/proc/self/maps").read_text()
    shutil.rmtree(place)
    steps(model, x, optimizer, 2)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    handle.undo()
    steps(model, x, optimizer)
    del handle, optimizer
    gc.collect()
    assert str(place) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == files


PLACES = [(FileTier, "bring"), (Weight, "put"), (Weight, "write_back"), (Weight, "empty")]


@pytest.mark.keeps("streamed-in-a-file")
@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_step_that_ctrl_c_cuts_while_blocks_travel_loses_nothing(owner, name, after, monkeypatch):
    moved, calls, cut_at = getattr(owner, name), [], 0
    (plain, x), (model, _) = built(), built()
    plain.eval(), model.eval()

    def cut(*args, **how):
        calls.append(name)
        if len(calls) == cut_at and not after:
            raise KeyboardInterrupt
        found = moved(*args, **how)
        if len(calls) == cut_at:
            raise KeyboardInterrupt
        return found

    with streamed(model):
        for cut_at in itertools.count(1):
            for weight in (*plain.parameters(), *model.parameters()):
                weight.detach().mul_(1.01)  # of a block that is here too
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, cut)
                with contextlib.suppress(KeyboardInterrupt):
                    loss(model, x).backward()
            model.zero_grad()
            assert all(
                torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
            )
            assert torch.equal(loss(model, x), loss(plain, x))
            if len(calls) < cut_at:
                break
    assert cut_at >= BLOCKS


# Weights that find no room are those of a frozen base too, and `tests/memory/test_pool.py` has the store's own refusal.
FULL = """
import os, resource, sys
import torch
import tightfit
from tightfit.errors import TightfitError
from tightfit.optim import OffloadedAdamW
from trained_blocks import built, loss

model, x = built()
before = [weight.clone() for weight in model.parameters()]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
try:
    tightfit.stream(model, "layers.*", trained=True)
    optimizer = OffloadedAdamW(model.parameters())
    loss(model, x).backward()
    optimizer.step()
except TightfitError as error:
    print(error)
assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
sys.stdout.flush()
os._exit(0)  # PyTorch 2.15 frees what an interrupted backward has left when Python has ended already, and crashes
"""


@pytest.mark.slow  # a plan for each case
@pytest.mark.sampled(1)
@pytest.mark.keeps("streamed-in-a-file")
@pytest.mark.parametrize(("share", "what"), [(1.5, "gradients"), (3, "optimizer states")])
def test_a_full_disk_is_one_line_and_no_weight_is_written(share, what):
    there = sum(-(-p.nbytes // 4096) * 4096 for p in built()[0]["layers"].parameters() if p.nbytes >= 512)
    surroundings = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", FULL, str(int(share * there))]
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=True)
    (line,) = done.stdout.splitlines()
    assert f"of {what} have no room in" in line
    assert line.startswith("stream: ")
    assert "name another folder" in line
