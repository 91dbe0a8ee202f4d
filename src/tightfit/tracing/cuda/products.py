"""The memory that products allocate on CUDA: cuBLAS's workspaces, by PyTorch's release, and copies of operands."""

import os
import re

import torch

from tightfit.tracing.cuda.allocator import MIB
from tightfit.tracing.cuda.attention import Capability
from tightfit.tracing.shapes import TensorShape

Release = tuple[int, int]

THREADS_WITH_PRODUCTS = 2  # forward's and backward's: each has its own cuBLAS handle, and with it a workspace
HANDLE_WORKSPACE = "workspace of a cuBLAS handle"  # the name of its storage in a trace
SMALL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
LARGE_WORKSPACE = 4096 * 8 * 1024
# The first release in which a generation of cards (the first number of its capability) has the large workspace. Hopper
# has it in every supported release. `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp: pull requests 175344
# (10, 12) and 189312 (11). Their releases were read from the machine code of that function in the wheels 2.11.0,
# 2.12.0, 2.12.1, 2.13.0, 2.14.0, 2.14.1 and 2.15.0.
_LARGE_SINCE: dict[int, Release] = {9: (2, 0), 10: (2, 12), 11: (2, 14), 12: (2, 12)}
# From this release on, each product allocates its workspace and frees it again: pull request 194311,
# `getCurrentCUDABlasHandleWithWorkspace` in the same file; in the wheel 2.15.0, not in 2.14.1.
_TAKEN_BY_EACH_PRODUCT: Release = (2, 15)
_LT_WORKSPACE = MIB  # cuBLASLt's, from that release on: `parseCUDABlasLtWorkspaceSize` in the same file

# The position of the first matrix among an operator's tensors. A bias may come before it.
_MATRICES = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "_addmm_activation": 1}


def blas_workspace(capability: Capability, release: Release) -> int:
    """Bytes of one workspace of cuBLAS: from `CUBLAS_WORKSPACE_CONFIG` if set, else by card and release.

    Source: `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp.
    """
    chosen = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(int(size) * 1024 * int(count) for size, count in chosen)
    since = _LARGE_SINCE.get(capability[0])
    return LARGE_WORKSPACE if since is not None and release >= since else SMALL_WORKSPACE


def held_workspaces(capability: Capability, release: Release) -> int:
    """Bytes of workspaces that remain allocated: one for each thread with products. cuBLASLt shares them.

    Source: `setWorkspaceForHandle` and `getCUDABlasLtWorkspace` in ATen/cuda/CublasHandlePool.cpp. Not counted: the
    separate workspace of 1 MiB of cuBLASLt (products with a bias) in 2.11 (pull request 175879).
    """
    return THREADS_WITH_PRODUCTS * blas_workspace(capability, release) if _are_cached(release) else 0


def takes_workspace(name: str) -> bool:
    """True if an operator gives its thread's handle of cuBLAS a workspace, if that has none yet."""
    operator = name.partition(".")[2].partition(".")[0]
    # Grouped products are cuBLAS's, but for those of bf16 on capability 9 and 10 (`_one_by_one`).
    return name.startswith("aten.") and (operator in _MATRICES or operator in ("dot", "_grouped_mm"))


def product_scratch(name: str, inputs: tuple[TensorShape, ...], capability: Capability, release: Release) -> list[int]:
    """Bytes that one product allocates while it runs: copies of operands, and from 2.15 on its workspace."""
    operator = name.partition(".")[2].partition(".")[0]
    if operator == "_grouped_mm":
        return _one_by_one(inputs, capability, release)
    if operator not in _MATRICES or not name.startswith("aten.") or any(shape.numel == 0 for shape in inputs):
        return []
    first = _MATRICES[operator]
    bias, matrices = inputs[:first], inputs[first : first + 2]
    copies = [shape.bytes for shape in matrices if len(shape.shape) > 1 and not _can_be_read(shape)]
    if _are_cached(release):
        return copies
    is_lt = operator in ("addmm", "_addmm_activation") and _adds_a_bias(bias[0], *matrices)
    return [*copies, _LT_WORKSPACE if is_lt else blas_workspace(capability, release)]


def _one_by_one(inputs: tuple[TensorShape, ...], capability: Capability, release: Release) -> list[int]:
    # `_grouped_mm_cuda` in native/cuda/GroupedBlas.cpp: CUTLASS multiplies bf16 on capability 9 and 10. Its tens of KiB
    # are not counted. cuBLAS multiplies everything else, one group at a time.
    is_cutlass = capability[0] in (9, 10) and all(shape.dtype == torch.bfloat16 for shape in inputs[:2])
    return [] if is_cutlass or _are_cached(release) else [blas_workspace(capability, release)]


def _are_cached(release: Release) -> bool:
    return release < _TAKEN_BY_EACH_PRODUCT or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def _can_be_read(matrix: TensorShape) -> bool:
    # `prepare_matrix_for_cublas` in native/cuda/cuBlasCommonArgs.h, `prepare_batch_matrix_for_cublas` in Blas.cpp: rows
    # or columns must be contiguous and must not overlap. The gradient of a sum has strides of 0, so it is copied.
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride[-2:]
    return (
        (row == 1 and column >= max(1, rows))
        or (column == 1 and row >= max(1, columns))
        or (len(matrix.shape) == 2 and _is_dense(matrix))
    )


def _is_dense(matrix: TensorShape) -> bool:
    size = 1
    for stride, length in sorted(zip(matrix.stride, matrix.shape, strict=True)):
        if length > 1:
            if stride != size:
                return False
            size *= length
    return True


def _adds_a_bias(bias: TensorShape, left: TensorShape, right: TensorShape) -> bool:
    # `isInputCompliesAddmmCudaLt` in native/cuda/Blas.cpp: the bias is a contiguous row, and no side has length one
    return bias.numel == bias.shape[-1] == right.shape[1] and min(*left.shape, *right.shape) > 1
