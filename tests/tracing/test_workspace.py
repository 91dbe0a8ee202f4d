"""Scratch memory inside kernels, against what the allocator recorded."""

import sys

import pytest
import torch

from tightfit.memory.allocator import cpu_rise
from tightfit.runtime.forked import in_a_fork
from tightfit.tracing import workspace
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.workspace import LARGEST_PRODUCT, cpu_workspace

aten = torch.ops.aten


@pytest.fixture
def threads():
    """Sets the number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="this process is forked")
def test_a_fork_predicts_the_scratch_memory_of_the_threads_that_it_cannot_use(threads):
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    shapes = [TensorShape.of(torch.randn(1, 2, 64, 16))] * 3
    found = []
    for count in (2, 3):
        threads(count)
        found.append(cpu_workspace(attention, shapes))
        assert in_a_fork(lambda: (torch.get_num_threads(), cpu_workspace(attention, shapes))) == (1, found[-1])
    assert found[0] * 3 == found[1] * 2


def test_what_a_product_takes_is_not_remembered_for_other_threads(threads, monkeypatch):
    asked = []
    monkeypatch.setattr(workspace, "cpu_rise", lambda call: asked.append(call()) or torch.get_num_threads() * 1000)
    shapes = [
        TensorShape.of(torch.ones(8, 24, dtype=torch.bfloat16)),
        TensorShape.of(torch.ones(24, 8, dtype=torch.bfloat16)),
    ]
    workspace._run_once.cache_clear()
    try:
        for count in (2, 3, 2):
            threads(count)
            assert cpu_workspace("aten.mm.default", shapes) == 1000 * count - 8 * 8 * 2
        assert len(asked) == 2
    finally:
        workspace._run_once.cache_clear()


def highest_above_results(call, results: int) -> int:
    """The highest point of the allocations of one call, its results taken off."""
    held = []
    top = cpu_rise(lambda: held.extend(call()))
    assert sum(t.untyped_storage().nbytes() for t in held) == results
    return top - results


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("operator", [aten.mm.default, aten.addmm.default, aten.bmm.default])
def test_a_large_product_in_16_bits_takes_what_two_small_ones_show(operator, transposed):
    left, right = torch.ones(900, 320, dtype=torch.bfloat16), torch.ones(320, 960, dtype=torch.bfloat16)
    assert left.numel() * right.shape[1] > LARGEST_PRODUCT
    if transposed:
        left = left.t().contiguous().t()
    arguments = (left, right)
    if operator is aten.addmm.default:
        arguments = (torch.ones(960, dtype=torch.bfloat16), *arguments)
    elif operator is aten.bmm.default:
        arguments = tuple(t.expand(3, *t.shape).clone() for t in arguments)
    measured, predicted = scratch(operator, *arguments)
    assert predicted == pytest.approx(measured, abs=1024)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_too_large_to_run_takes_what_a_smaller_one_shows(monkeypatch, transposed):
    monkeypatch.setattr(workspace, "LARGEST_FAST_PRODUCT", 1)
    left, right = torch.ones(2048, 256, dtype=torch.bfloat16), torch.ones(256, 2048, dtype=torch.bfloat16)
    if transposed:
        left = left.t().contiguous().t()
    measured, predicted = scratch(aten.mm.default, left, right)
    assert predicted == pytest.approx(measured, abs=1024)


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


def scratch(operator, *arguments, **options):
    """Measured bytes of a call beside its result, and predicted ones."""
    results = []

    def call():
        results[:] = [operator(*arguments, **options)]
        return results

    call()
    measured = highest_above_results(call, results[0].untyped_storage().nbytes())
    inputs = [TensorShape.of(a) for a in arguments if isinstance(a, torch.Tensor)]
    constants = tuple(a for a in arguments if not isinstance(a, torch.Tensor))
    return measured, cpu_workspace(str(operator), inputs, [TensorShape.of(results[0])], constants)


@pytest.mark.keeps("intermediate-results-composite-operators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_made_of_others_take_what_lies_between_those(dtype):
    rows = torch.randn(64, 1000).to(dtype)
    measured, predicted = scratch(aten.logsumexp.default, rows, [1])
    assert predicted == measured > rows.nbytes
    measured, predicted = scratch(aten._safe_softmax.default, rows, 1)
    assert predicted == measured > rows.numel()


@pytest.mark.keeps("intermediate-results-composite-operators")
@pytest.mark.parametrize(
    ("operator", "source", "options"),
    [
        (aten.sum.dim_IntList, torch.ones(64, 1000, dtype=torch.bool), {}),
        (aten.sum.dim_IntList, torch.ones(64, 1000, dtype=torch.bfloat16), {"dtype": torch.float32}),
        (aten.mean.dim, torch.ones(64, 1000, dtype=torch.bfloat16), {}),
        (aten.mean.dim, torch.ones(64, 1000, dtype=torch.bfloat16), {"dtype": torch.float32}),
    ],
)
def test_sums_in_another_dtype_convert_their_input_as_a_whole(operator, source, options):
    measured, predicted = scratch(operator, source, [1], **options)
    assert predicted == measured >= 4 * source.numel()


def test_running_counts_of_a_mask_convert_it_as_a_whole():
    measured, predicted = scratch(aten.cumsum.default, torch.ones(64, 1000, dtype=torch.bool), 1)
    assert predicted == measured == 8 * 64000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", ["scatter_add", "scatter", "gather", "index_add"])
def test_scattering_and_gathering_in_16_bits_goes_through_fp32(operator, dtype):
    table, rows = torch.zeros(64, 100, dtype=dtype), torch.ones(64, 80, dtype=dtype)
    index, columns = torch.arange(80).repeat(64, 1).contiguous(), torch.arange(80)
    call = {
        "scatter_add": (aten.scatter_add.default, table, 1, index, rows),
        "scatter": (aten.scatter.src, table, 1, index, rows),
        "gather": (aten.gather.default, table, 1, index),
        "index_add": (aten.index_add.default, table, 1, columns, rows),
    }[operator]
    measured, predicted = scratch(*call)
    assert predicted == measured
    assert (measured > 0) == (dtype is not torch.float32)
