"""Scratch memory that an operator takes from the allocator and gives back before it returns: unseen by dispatch."""

import math
from collections.abc import Callable, Sequence

import torch

from tightfit.trace.shapes import TensorShape


def cpu_attention_splits(query_length: int, key_length: int) -> tuple[int, int]:
    """Rows of q and of k that a thread works on at a time.

    Source: `flash_attention_kernel_impl` in ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    query_split = 256 if query_length >= 768 else 64 if query_length >= 192 else 32
    return min(query_split, query_length), min(512, key_length)


def _cpu_attention(inputs: Sequence[TensorShape]) -> int:
    # Per thread, in the accumulation type: scores, running maximum, running sum, output; and the scores in the
    # input's type where that is narrower. Source: `cpu_flash_attention`, same file. Measured equal:
    # tests/trace/test_workspace.py.
    query, key = inputs[0], inputs[1]
    rows, columns = cpu_attention_splits(query.shape[-2], key.shape[-2])
    width = 8 if query.dtype == torch.float64 else 4
    per_thread = (rows * columns + 2 * rows + rows * query.shape[-1]) * width
    if query.dtype.itemsize == 2:
        per_thread += rows * columns * 2
    return torch.get_num_threads() * per_thread


def _cpu_attention_backward(inputs: Sequence[TensorShape]) -> int:
    # Per thread: scores and their gradient, and both in the input's type where that is narrower; once: a row of sums.
    query, key = inputs[1], inputs[2]
    rows, columns = cpu_attention_splits(query.shape[-2], key.shape[-2])
    width = 8 if query.dtype == torch.float64 else 4
    per_thread = 2 * rows * columns * width
    if query.dtype.itemsize == 2:
        per_thread += 2 * rows * columns * 2
    return torch.get_num_threads() * per_thread + rows * width


WORKSPACES: dict[str, Callable[[Sequence[TensorShape]], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _cpu_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _cpu_attention_backward,
}


def workspace_bytes(name: str, inputs: Sequence[TensorShape]) -> int:
    """Bytes of scratch memory of one operator call."""
    formula = WORKSPACES.get(name)
    return 0 if formula is None or math.prod(inputs[0].shape) == 0 else formula(inputs)
