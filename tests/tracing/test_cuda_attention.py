"""Which attention kernel CUDA chooses: the constraints of PyTorch's sdp_utils.cpp, row by row."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tightfit
from tightfit.tracing.cuda import CudaRole, attention
from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.cuda.attention import AttentionCall, Backend, choose_backend, gemm_alignment
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.shapes import TensorShape

T4, A100, RTX4090, H200, B200 = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(
    dtype=BF16, *, heads=4, kv_heads=4, length=64, keys=64, width=64, mask=None, dropout=0.0, causal=True, grouped=False
) -> AttentionCall:
    def tensor(heads: int, length: int) -> torch.Tensor:
        return torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=True)

    made = None if mask is None else torch.empty(mask, dtype=torch.bool, device="meta")
    return AttentionCall(
        tensor(heads, length), tensor(kv_heads, keys), tensor(kv_heads, keys), made, dropout, causal, grouped
    )


@pytest.mark.keeps("dry-run-chooses-attention")
@pytest.mark.parametrize(
    ("capability", "asked", "chosen"),
    [
        (H200, call(), Backend.CUDNN),
        (A100, call(), Backend.FLASH),
        (T4, call(FP16), Backend.EFFICIENT),
        (T4, call(BF16), Backend.MATH),
        (A100, call(FP32), Backend.EFFICIENT),
        (H200, call(FP32), Backend.EFFICIENT),
        (H200, call(torch.float64), Backend.MATH),
        (H200, call(mask=(2, 1, 64, 64), causal=False), Backend.CUDNN),
        (A100, call(mask=(2, 1, 64, 64), causal=False), Backend.EFFICIENT),
        (H200, call(mask=(64, 64), causal=False), Backend.CUDNN),
        (H200, call(mask=(1, 64, 64), causal=False), Backend.EFFICIENT),
        (H200, call(width=256), Backend.CUDNN),
        (H200, call(width=264), Backend.EFFICIENT),
        (B200, call(width=136), Backend.FLASH),
        (RTX4090, call(width=224), Backend.EFFICIENT),
        (RTX4090, call(width=256), Backend.FLASH),
        (RTX4090, call(width=256, dropout=0.125), Backend.EFFICIENT),
        (A100, call(width=512), Backend.EFFICIENT),
        (A100, call(width=20), Backend.FLASH),
        (H200, call(width=20), Backend.FLASH),
        (A100, call(FP32, width=6), Backend.MATH),
        (H200, call(dropout=0.125), Backend.CUDNN),
        (A100, call(kv_heads=2, grouped=True), Backend.FLASH),
        (H200, call(kv_heads=2, grouped=True), Backend.CUDNN),
        (A100, call(keys=128), Backend.EFFICIENT),
        (A100, call(keys=128, causal=False), Backend.FLASH),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple | Backend) else "",
)
def test_the_first_kernel_that_takes_the_call_is_chosen(capability, asked, chosen):
    assert choose_backend(asked, capability) is chosen


@pytest.mark.parametrize(
    ("capability", "asked"),
    [
        (A100, call(FP32, kv_heads=2, grouped=True)),
        (A100, call(kv_heads=2, grouped=True, mask=(2, 1, 64, 64), causal=False)),
        (T4, call(FP16, kv_heads=2, grouped=True)),
    ],
    ids=["fp32", "a mask", "no flash kernel"],
)
@pytest.mark.parametrize(("release", "chosen"), [((2, 13), Backend.MATH), ((2, 14), Backend.EFFICIENT)])
def test_the_memory_efficient_kernel_takes_groups_of_heads_since_2_14(capability, asked, release, chosen, monkeypatch):
    monkeypatch.setattr(attention, "installed_release", lambda: release)
    assert choose_backend(asked, capability) is chosen


def test_on_data_centre_blackwell_cudnn_takes_the_widths_of_latent_attention():
    asked = call(width=192)
    narrow = AttentionCall(asked.query, asked.key, asked.value[..., :128])
    assert choose_backend(narrow, B200) is Backend.CUDNN
    assert choose_backend(narrow, A100) is Backend.EFFICIENT


def test_a_tensor_that_is_not_contiguous_along_its_last_dimension_is_left_to_the_plain_kernel():
    asked = call()
    turned = asked.query.transpose(2, 3)
    assert choose_backend(AttentionCall(turned, turned, turned), A100) is Backend.MATH


def test_without_a_gradient_wide_heads_stay_with_flash_on_small_cards():
    with torch.no_grad():
        assert choose_backend(call(width=224), RTX4090) is Backend.FLASH


@pytest.mark.keeps("dry-run-chooses-attention")
def test_the_users_switches_are_respected():
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choose_backend(call(), H200) is Backend.EFFICIENT
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choose_backend(call(), A100) is Backend.MATH


def test_an_older_cudnn_is_not_preferred(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert choose_backend(call(), H200) is Backend.FLASH


@pytest.mark.parametrize(
    ("dtype", "capability", "elements"),
    [(BF16, A100, 8), (FP32, A100, 4), (FP16, T4, 8), (FP32, T4, 1), (FP32, (6, 1), 1)],
)
def test_head_widths_are_aligned_to_128_bits_where_tensor_cores_are_used(dtype, capability, elements):
    assert gemm_alignment(dtype, capability) == elements


def test_the_triangle_that_attention_makes_itself_is_not_computed(monkeypatch):
    sizes = []
    compute = DryRun.compute

    def noting(self, traits, func, args, kwargs):
        result = compute(self, traits, func, args, kwargs)
        sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)
        return result

    monkeypatch.setattr(DryRun, "compute", noting)
    query, key = torch.randn(1, 4, 512, 16, requires_grad=True), torch.randn(1, 2, 512, 16, requires_grad=True)

    def grouped(triangle):
        result = scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        return result, triangle.tril()

    tightfit.trace(grouped, torch.ones(512, 512, dtype=torch.bool), device="h200")
    assert sizes.count(512 * 512) == 1  # the triangle of the function, which a branch may depend on


@pytest.mark.parametrize(("release", "chosen"), [((2, 11), Backend.CUDNN), ((2, 12), Backend.FLASH)])
def test_the_release_decides_which_dropout_cudnn_takes(monkeypatch, release, chosen):
    monkeypatch.setattr(attention, "installed_release", lambda: release)
    assert choose_backend(call(dropout=0.1), H200) == chosen
    assert choose_backend(call(dropout=0.125), H200) == Backend.CUDNN


def test_cudnns_own_memory_is_that_of_an_h200():
    def blocks(name: str, *tensors: torch.Tensor, results: int) -> list[int]:
        shapes = [TensorShape.of(tensor) for tensor in tensors]
        found = CudaRole(H200, 132).workspace(f"aten.{name}.default", shapes, shapes[:1] * results, ())
        return [size for size in found.blocks if size != RESULT]

    def tensor(heads: int, *shape: int) -> torch.Tensor:
        return torch.empty(2, heads, *shape, dtype=BF16, device="meta")

    # As `python -m pytest tests/card/test_operators.py` measured there: torch 2.11.0, 2 x 4 x 128 x 64.
    query, few = tensor(4, 128, 64), tensor(2, 128, 64)
    forward, backward = "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"
    assert blocks(forward, query, query, query, results=4) == [512]
    assert blocks(backward, query, query, query, query, results=3) == [266_752]
    assert blocks(backward, query, query, few, few, results=3) == [528_896]
