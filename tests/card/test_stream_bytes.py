"""Streamed blocks on a card take the bytes that a dry run predicts."""

import gc

import pytest
import torch

import tightfit
import trained_blocks
from adapted_blocks import KINDS, built, of_batch
from tightfit.memory.snapshot import snapshot_of
from tightfit.optim import OffloadedAdamW


@pytest.fixture(autouse=True)
def recorded_history(growing_segments):
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def assert_peak(predicted):
    """A reader thread and backward's own thread run beside this one: who holds more than predicted is in the error."""
    measured = torch.cuda.max_memory_allocated()
    if measured != predicted:
        found = snapshot_of(torch.cuda.memory._snapshot())
        raise AssertionError(f"{measured} bytes, predicted {predicted}; at the peak: {found.holders}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("beside", ["alone", "recompute", "offload"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_blocks_take_the_predicted_bytes(kind, ahead, beside):
    model, x = built(kind)
    batch = {"x": x.detach().cuda()}
    if beside == "recompute":
        tightfit.recompute(model, "layers.*")
    if beside == "offload":
        tightfit.offload(model, "layers.*", smallest=1)
    tightfit.stream(model, "layers.*", ahead=ahead, device="cuda")
    predicted = tightfit.estimate(model, batch, loss=of_batch, optimizer="adamw", device="cuda").peak_bytes
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        gc.collect()  # tensors in cycles of earlier runs would count
        torch.cuda.reset_peak_memory_stats()
        of_batch(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_peak(predicted)
    tightfit.undo(model)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_file", [False, True])
def test_trained_weights_take_the_predicted_bytes(is_file, dtype, ahead, tmp_path):
    model, x = trained_blocks.built(dtype)
    batch = {"x": x.cuda()}
    how = {"loss": trained_blocks.of_batch, "optimizer": "offloaded_adamw", "device": "cuda"}
    tightfit.stream(model, "layers.*", trained=True, ahead=ahead, device="cuda", tier=tmp_path if is_file else None)
    found = tightfit.estimate(model, batch, **how)
    predicted = found.peak_bytes
    if is_file:  # those of head and embedding are in memory
        of_blocks = sum(p.nbytes for p in model["layers"].parameters() if p.nbytes >= 512)
        assert found.host_by_category["gradients"] < of_blocks
    optimizer = OffloadedAdamW(model.parameters())
    for _ in range(3):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        trained_blocks.of_batch(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_peak(predicted)
    tightfit.undo(model)
