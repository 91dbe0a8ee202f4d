"""Scratch memory of CUDA's softmax and normalisation kernels, by hand from the sources that the formulas name."""

import pytest
import torch
from torch import nn

from tightfit.levers.micro_batch import as_parts
from tightfit.runtime.internals import installed_release
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import round_size
from tightfit.tracing.cuda.workspace import cuda_workspace
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import trace_step

pytestmark = pytest.mark.keeps("softmax-norms-use-cuda")

A100 = CudaRole((8, 0), 108)


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    return TensorShape.of(torch.empty(sizes, dtype=dtype, device="meta"))


def turned(*sizes: int, dtype: torch.dtype = torch.float32) -> TensorShape:
    """A tensor of these sizes whose last two dimensions lie the other way round."""
    return TensorShape.of(torch.empty(*sizes[:-2], sizes[-1], sizes[-2], dtype=dtype, device="meta").mT)


def spread(*sizes: int) -> TensorShape:
    """One number, expanded: the gradient that a sum hands on."""
    return TensorShape.of(torch.empty(1, device="meta").expand(sizes))


def softmax_backward(gradient: TensorShape, output: TensorShape, name: str = "_softmax_backward_data") -> int:
    return cuda_workspace(f"aten.{name}.default", [gradient, output], [output], (-1, output.dtype))


def test_softmax_backward_multiplies_the_gradient_by_the_output():
    scores = shape(2, 8, 128, 128, dtype=torch.bfloat16)
    assert softmax_backward(scores, scores) == scores.bytes


def test_softmax_backward_copies_a_product_that_is_not_contiguous():
    scores, other = shape(2, 8, 128, 128), turned(2, 8, 128, 128)
    assert softmax_backward(spread(2, 8, 128, 128), scores) == scores.bytes  # the product lies as the output does
    assert softmax_backward(other, scores) == 2 * scores.bytes  # as the first operand
    assert softmax_backward(other, other) == 3 * scores.bytes  # and the output is copied too


def test_log_softmax_backward_copies_but_multiplies_nothing():
    logits = shape(2048, 1000)
    assert softmax_backward(logits, logits, "_log_softmax_backward_data") == 0
    copied = softmax_backward(spread(2048, 1000), logits, "_log_softmax_backward_data")
    assert copied == round_size(logits.bytes)


def norm_backward(name: str, gradient: TensorShape, source: TensorShape) -> int:
    statistics = shape(*source.shape[:-1], 1)
    between = [statistics] if name == "_fused_rms_norm_backward" else [statistics, statistics]
    weight = shape(source.shape[-1])
    inputs = [gradient, source, *between, weight]
    results = [source, *[weight] * (len(between))]
    return A100.workspace(f"aten.{name}.default", inputs, results, ([source.shape[-1]], [True] * len(results)))


def test_norms_copy_a_gradient_that_is_not_contiguous_and_a_source_too():
    source, other = shape(4, 256, 512), turned(4, 256, 512)
    for name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
        assert norm_backward(name, source, source) == 0
        assert norm_backward(name, spread(4, 256, 512), source) == source.bytes
        assert norm_backward(name, other, other) == 2 * source.bytes
    for name in ("native_layer_norm", "_fused_rms_norm"):
        call = f"aten.{name}.default"
        assert cuda_workspace(call, [source, shape(512)], [source], ([512], 1e-5)) == 0
        assert cuda_workspace(call, [other, shape(512)], [source], ([512], 1e-5)) == source.bytes


def group_norm(source: TensorShape, weighted: bool) -> int:
    weights = [shape(source.shape[1], dtype=source.dtype)] * 2 if weighted else []
    missing = () if weighted else (None, None)
    batch, channels, pixels = source.shape
    arguments = (*missing, batch, channels, pixels, 4, 1e-5)
    return cuda_workspace("aten.native_group_norm.default", [source, *weights], [source], arguments)


def group_norm_backward(source: TensorShape, weighted: bool, mask: list[bool]) -> int:
    batch, channels, pixels = source.shape
    statistics = shape(batch, 4, dtype=source.dtype)
    weights = [shape(channels, dtype=source.dtype)] if weighted else []
    arguments = (*(() if weighted else (None,)), batch, channels, pixels, 4, mask)
    inputs = [source, source, statistics, statistics, *weights]
    return cuda_workspace("aten.native_group_norm_backward.default", inputs, [source], arguments)


def test_group_norm_keeps_a_scale_and_a_shift_of_every_channel_while_it_runs():
    source = shape(128, 64, 512)
    assert group_norm(source, weighted=True) == 2 * 4 * 128 * 64
    assert group_norm(source, weighted=False) == 0
    half = shape(128, 64, 512, dtype=torch.bfloat16)
    in_fp32 = installed_release() >= (2, 13)  # statistics of 16-bit inputs
    assert group_norm(half, weighted=False) == (2 * 4 * 128 * 4 if in_fp32 else 0)
    assert group_norm(shape(128, 64, 1), weighted=True) == 0


def test_group_norm_backward_sums_in_fp32_by_channel_and_by_group():
    channel, group = 4 * 128 * 64, 4 * 128 * 4
    for dtype in (torch.float32, torch.bfloat16):
        source = shape(128, 64, 512, dtype=dtype)
        assert group_norm_backward(source, True, [True, True, True]) == 3 * channel + 2 * group
        assert group_norm_backward(source, False, [True, False, False]) == 2 * channel + 2 * group
        assert group_norm_backward(source, True, [False, True, True]) == 2 * channel
    assert group_norm_backward(shape(128, 64, 1), True, [True, True, True]) == 2 * channel + 2 * group


def test_a_step_with_eager_attention_counts_the_product():
    """The product is as large as the scores, and stands beside the gradient that comes in and the one that goes out."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(1, 1024, 3, 4, 16).transpose(1, 3).unbind(2)
            return ((q @ k.mT).softmax(-1) @ v).sum()

    trace = trace_step(Attention(), as_parts([(torch.randn(1, 1024, 64),)], _loss), _loss, role=A100)
    peak = trace.peak_operator
    assert peak.name == "aten._softmax_backward_data.default"
    assert peak.workspace_bytes == 4 * 4 * 1024 * 1024


def _loss(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
    return model(*batch)
