"""Scratch memory of products with 4-bit weights on CUDA, where the package can be asked and where it cannot."""

import pytest
import torch

from tightfit.tracing.cuda import four_bits
from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.cuda.reductions import LaunchLimits
from tightfit.tracing.shapes import contiguous

CARD, RELEASE = LaunchLimits((8, 9), 128), (2, 13)
NAME = "bitsandbytes.gemm_4bit.default"


@pytest.fixture(autouse=True)
def asked_anew():
    four_bits.widens.cache_clear()
    yield
    four_bits.widens.cache_clear()


def scratch(rows, inner=4096, columns=4096, dtype=torch.bfloat16):
    source = contiguous((rows, inner), dtype)
    return four_bits.four_bit_scratch(NAME, [source], ([columns, inner], 64), CARD, RELEASE)


def test_many_rows_are_multiplied_by_the_weight_at_full_width_which_is_made_before_the_result():
    assert scratch(2048) == [4096 * 4096 * 2, RESULT]
    assert scratch(9, dtype=torch.float32) == [4096 * 4096 * 4, RESULT]


def test_a_kernel_reads_the_codes_for_few_rows():
    assert scratch(1) == scratch(4) == []


def test_rows_that_end_within_a_block_of_codes_are_widened_for_few_rows_too():
    assert scratch(1, inner=96) == [4096 * 96 * 2, RESULT]


def test_the_weight_is_widened_where_the_package_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(four_bits, "_package", lambda: None)
    assert scratch(1) == [4096 * 4096 * 2, RESULT]


def test_asking_leaves_the_package_and_torch_as_they_are():
    package = four_bits._package()
    before = package._gpu_dispatch_props
    scratch(16)
    assert package._gpu_dispatch_props is before
    assert torch.version.cuda or not hasattr(torch._C, "_cuda_getCurrentRawStream")
