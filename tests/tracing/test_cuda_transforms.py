"""Fourier transforms on cards: what a dry run adds to their results. The card's own suite has the bytes of each."""

import pytest
import torch

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.cuda.workspace import cuda_workspace
from tightfit.tracing.shapes import TensorShape

pytestmark = pytest.mark.keeps("card-copies-counted")


def blocks(operator, x, out, *arguments):
    return cuda_workspace(operator, [TensorShape.of(x)], [TensorShape.of(out)], arguments).blocks


def test_the_last_dimension_takes_a_work_area_and_another_one_a_copy_too():
    x = torch.empty(16, 256, 128, device="meta")
    area = 16 * 256 * 128 * 8  # a complex number for each element
    out = torch.empty(16, 256, 65, device="meta", dtype=torch.complex64)
    assert blocks("aten._fft_r2c.default", x, out, [2], 0, True) == (RESULT, area, -area)
    out = torch.empty(16, 129, 128, device="meta", dtype=torch.complex64)
    assert blocks("aten._fft_r2c.default", x, out, [1], 0, True) == (RESULT, x.nbytes, area, -area, -x.nbytes)


def test_a_transform_to_real_numbers_copies_its_operand():
    x = torch.empty(16, 256, 65, device="meta", dtype=torch.complex64)
    out = torch.empty(16, 256, 128, device="meta")
    area = 16 * 256 * 128 * 8
    assert blocks("aten._fft_c2r.default", x, out, [2], 2, 128) == (RESULT, x.nbytes, area, -area, -x.nbytes)


def test_more_than_three_dimensions_take_a_result_between():
    x = torch.empty(2, 3, 4, 5, 6, device="meta", dtype=torch.complex64)
    found = blocks("aten._fft_c2c.default", x, x, [0, 1, 2, 3], 0, True)
    assert found[0] > 0, "the first pass writes beside"
    assert found.count(RESULT) == 1
    assert sum(found) == 0, "all of it is given back"
