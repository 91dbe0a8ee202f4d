"""What cuBLAS takes of the allocator's memory, by hand from the sources that the formulas name."""

import pytest
import torch

from tightfit.levers.micro_batch import as_parts
from tightfit.runtime.internals import installed_release
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import MIB
from tightfit.tracing.cuda.products import blas_workspace, product_scratch, takes_workspace
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import trace_step
from tiny import decoder, token_batch

SMALL, LARGE = 8 * MIB + 128 * 1024, 32 * MIB
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def as_pytorch_does_by_itself(monkeypatch):
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUBLAS_WORKSPACE_CACHE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.keeps("cublas-workspaces-card-pytorch")
@pytest.mark.parametrize(
    ("capability", "releases"),
    [
        ((8, 0), {}),
        ((8, 9), {}),
        ((9, 0), {(2, 11): LARGE, (2, 12): LARGE, (2, 13): LARGE, (2, 14): LARGE, (2, 15): LARGE}),
        ((10, 0), {(2, 12): LARGE, (2, 13): LARGE, (2, 14): LARGE, (2, 15): LARGE}),
        ((11, 0), {(2, 14): LARGE, (2, 15): LARGE}),
        ((12, 0), {(2, 12): LARGE, (2, 13): LARGE, (2, 14): LARGE, (2, 15): LARGE}),
    ],
)
def test_which_card_has_the_large_workspace_hangs_on_the_release(capability, releases):
    for release in [(2, minor) for minor in range(11, 16)]:
        assert blas_workspace(capability, release) == releases.get(release, SMALL)


def test_the_size_that_the_user_sets_is_taken(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert blas_workspace(HOPPER, (2, 13)) == SMALL
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert blas_workspace((8, 0), (2, 13)) == LARGE


@pytest.mark.keeps("cublas-workspaces-card-pytorch")
def test_until_2_14_each_thread_keeps_a_workspace_and_then_each_product_takes_one(monkeypatch):
    products = [("aten.mm.default", (matrix(64, 32), matrix(32, 16)))]
    for release in ((2, 11), (2, 14)):
        role = CudaRole(HOPPER, 132, release)
        assert role.held_bytes == 2 * LARGE
        assert [role.workspace(name, inputs, (), ()) for name, inputs in products] == [0]
    role = CudaRole(HOPPER, 132, (2, 15))
    assert role.held_bytes == 0
    assert [role.workspace(name, inputs, (), ()) for name, inputs in products] == [LARGE]
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert role.held_bytes == 2 * LARGE
    assert [role.workspace(name, inputs, (), ()) for name, inputs in products] == [0]


def test_a_product_with_a_bias_takes_cublaslts_workspace_where_no_side_is_one():
    bias, left, right = vector(16), matrix(64, 32), matrix(32, 16)
    assert scratch("addmm", bias, left, right, release=(2, 15)) == [MIB]
    assert scratch("addmm", bias, matrix(1, 32), right, release=(2, 15)) == [LARGE]
    assert scratch("addmm", matrix(64, 16), left, right, release=(2, 15)) == [LARGE]
    assert scratch("baddbmm", batch(2, 64, 16), batch(2, 64, 32), batch(2, 32, 16), release=(2, 15)) == [LARGE]


def test_operands_are_copied_where_neither_rows_nor_columns_lie_one_after_the_other():
    right = matrix(32, 16)
    assert scratch("mm", TensorShape((64, 32), (0, 0), torch.float32), right) == [4 * 64 * 32]
    assert scratch("mm", TensorShape((64, 32), (64, 2), torch.float32), right) == [4 * 64 * 32]
    assert scratch("mm", TensorShape((64, 32), (1, 64), torch.float32), right) == []
    assert scratch("mm", TensorShape((64, 32), (96, 1), torch.float32), right) == []
    assert scratch("mm", TensorShape((1, 32), (0, 1), torch.float32), right) == []
    heads = TensorShape((8, 64, 32), (0, 32, 1), torch.bfloat16)
    assert scratch("bmm", heads, batch(8, 32, 16)) == []
    assert scratch("bmm", TensorShape((8, 64, 32), (64, 1, 512), torch.bfloat16), batch(8, 32, 16)) == []
    assert scratch("bmm", TensorShape((8, 64, 32), (2, 512, 16), torch.bfloat16), batch(8, 32, 16)) == [2 * 8 * 64 * 32]


def test_what_is_no_product_or_empty_takes_nothing():
    assert scratch("mul", matrix(64, 32), matrix(64, 32), release=(2, 15)) == []
    assert scratch("mm", matrix(0, 32), matrix(32, 16), release=(2, 15)) == []


def test_groups_are_multiplied_by_cublas_where_cutlass_does_not():
    def grouped(dtype: torch.dtype, capability: tuple[int, int], release: tuple[int, int] = (2, 15)) -> list[int]:
        tokens, experts = TensorShape((64, 32), (32, 1), dtype), TensorShape((4, 32, 16), (512, 16, 1), dtype)
        return product_scratch("aten._grouped_mm.default", (tokens, experts), capability, release)

    assert grouped(torch.bfloat16, HOPPER) == []
    assert grouped(torch.float32, HOPPER) == [LARGE]
    assert grouped(torch.bfloat16, (8, 0)) == [SMALL]
    assert grouped(torch.bfloat16, (8, 0), (2, 14)) == []


def test_a_step_on_2_15_peaks_lower_by_what_was_held_and_higher_by_one_workspace():
    def peak(release):
        parts = as_parts([token_batch()], model_loss)
        role = CudaRole(HOPPER, 132, release)
        return trace_step(decoder(), parts, model_loss, settings=StepSettings(), role=role).peak_bytes

    held, taken = peak((2, 14)), peak((2, 15))
    assert 2 * LARGE - LARGE - 2 * MIB < held - taken <= 2 * LARGE


def test_the_release_that_runs_is_the_one_that_is_predicted():
    assert torch.__version__.startswith(".".join(map(str, installed_release())))
    assert CudaRole(HOPPER, 132).release == installed_release()


def scratch(operator: str, *inputs: TensorShape, release=(2, 14)) -> list[int]:
    return product_scratch(f"aten.{operator}.default", inputs, HOPPER, release)


def vector(length: int) -> TensorShape:
    return TensorShape((length,), (1,), torch.float32)


def matrix(rows: int, columns: int) -> TensorShape:
    return TensorShape((rows, columns), (columns, 1), torch.float32)


def batch(size: int, rows: int, columns: int) -> TensorShape:
    return TensorShape((size, rows, columns), (rows * columns, columns, 1), torch.float32)


def test_grouped_products_give_their_thread_a_workspace_of_cublas():
    assert takes_workspace("aten._grouped_mm.default")
    assert not takes_workspace("aten.add.Tensor")
