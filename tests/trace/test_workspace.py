"""Scratch memory inside kernels, against what the allocator recorded."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tightfit.trace.shapes import TensorShape
from tightfit.trace.workspace import cpu_workspace

aten = torch.ops.aten


def highest_above_results(call, results: int) -> int:
    """The highest point of the allocations of one call, its results taken off."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        held = call()
    level = top = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            top = max(top, level)
    assert sum(t.untyped_storage().nbytes() for t in held) == results
    return top - results


@pytest.mark.parametrize(("heads", "kv_heads", "length", "width"), [(4, 4, 100, 32), (4, 2, 256, 64), (2, 2, 1000, 64)])
def test_attention_takes_the_scratch_memory_that_is_predicted(heads, kv_heads, length, width):
    q = torch.randn(2, heads, length, width)
    k, v = (torch.randn(2, kv_heads, length, width) for _ in range(2))
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward(q, k, v, 0.0, True)
    shapes = [TensorShape.of(t) for t in (q, k, v)]
    measured = highest_above_results(lambda: forward(q, k, v, 0.0, True), out.nbytes + logsumexp.nbytes)
    assert cpu_workspace(str(forward), shapes) == measured
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    arguments = (torch.randn_like(out), q, k, v, out, logsumexp)
    measured = highest_above_results(lambda: backward(*arguments, 0.0, True), q.nbytes + k.nbytes + v.nbytes)
    assert cpu_workspace(str(backward), [TensorShape.of(t) for t in arguments]) == measured
