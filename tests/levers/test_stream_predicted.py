"""The dry run of a step with streamed blocks has the peak of the real step, and the time of its copies."""

import pytest
import torch

import tightfit
from adapted_blocks import KINDS, built, of_batch
from tightfit.memory.allocator import measured_peak
from tightfit.training.loop import resident_tensors


def streamed(model):
    return tightfit.stream(model, "layers.*")


WAYS = {
    "alone": lambda model: [streamed(model)],
    "around recompute": lambda model: [tightfit.recompute(model, "layers.*"), streamed(model)],
    "within recompute": lambda model: [streamed(model), tightfit.recompute(model, "layers.*")],
    "two of six blocks": lambda model: [tightfit.stream(model, "layers.[24]")],
    "around offload": lambda model: [tightfit.offload(model, "layers.*", smallest=1), streamed(model)],
}


def estimated(model, x, device="cpu"):
    return tightfit.estimate(model, {"x": x}, loss=of_batch, optimizer="adamw", device=device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_predicted_peak_is_the_allocators(kind, way):
    model, x = built(kind)
    x = x.detach()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    handles = WAYS[way](model)

    def step():
        of_batch(model, {"x": x}).backward()
        optimizer.step()
        optimizer.zero_grad()

    predicted = estimated(model, x)
    step(), step()
    assert measured_peak(step, resident_tensors(model, optimizer, {"x": x})) == predicted.peak_bytes
    assert estimated(model, x).peak_bytes == predicted.peak_bytes, "wherever the blocks are when it is asked"
    for handle in reversed(handles):
        handle.undo()
    assert estimated(model, x).peak_bytes > predicted.peak_bytes


def test_copies_take_time_where_they_outlast_the_computation():
    model, x = built()
    x = x.detach()
    plain = estimated(model, x, "rtx4090").step_seconds
    late = {}
    for ahead in (0, 1):
        with tightfit.stream(model, "layers.*", ahead=ahead):
            late[ahead] = estimated(model, x, "rtx4090").step_seconds
    assert late[0] > late[1] >= plain
    assert estimated(model, x, "rtx4090").step_seconds == plain
