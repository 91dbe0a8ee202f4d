"""The memory of a product with 4-bit weights on CUDA: a kernel reads the codes, or the weight is widened for a product.

Which of the two, bitsandbytes decides by the sizes and the card; the decision is asked of the package. Its file for
CUDA is imported for that, on machines without CUDA too.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.cuda.products import Release, product_scratch
from tightfit.tracing.cuda.reductions import LaunchLimits
from tightfit.tracing.shapes import TensorShape

_PRODUCT = "bitsandbytes.gemm_4bit.default"
# Of that file: rows from which on it always widens, its decision, and what it knows of the card.
_DECISION = "_gemm_4bit_custom_max_m", "_gemm_4bit_use_custom_cuda", "_gpu_dispatch_props"
_RAW_STREAM = "_cuda_getCurrentRawStream"  # which the file looks up as it is imported, and calls in kernels alone


def four_bit_scratch(
    name: str, inputs: Sequence[TensorShape], arguments: tuple, card: LaunchLimits, release: Release
) -> list[int]:
    """Bytes of scratch memory of one operator call: the weight at full width, made before the result, or nothing.

    Source: `_dequant_linear_fallback` in bitsandbytes/backends/cuda/ops.py.
    """
    if name != _PRODUCT:
        return []
    source, (columns, inner), block = inputs[0], *arguments[:2]
    rows = math.prod(source.shape[:-1])
    if inner % block == 0 and not widens(rows, inner, columns, source.dtype, card):
        return []
    weight = TensorShape((inner, columns), (1, inner), source.dtype)
    matrices = (TensorShape((rows, inner), (inner, 1), source.dtype), weight)
    return [weight.bytes, RESULT, *product_scratch("aten.mm.default", matrices, card.capability, release)]


@functools.cache
def widens(rows: int, inner: int, columns: int, dtype: torch.dtype, card: LaunchLimits) -> bool:
    """True if the package widens the weight (columns, inner) for that many rows; so it is where it cannot be asked."""
    package = _package()
    largest, decides, its_own = (getattr(package, name, None) for name in _DECISION)
    if largest is None or decides is None or its_own is None or rows > largest:
        return True
    major, minor = card.capability
    package._gpu_dispatch_props = lambda index: (card.multiprocessors, major, minor)
    try:
        decide: Callable[..., bool] = decides.__wrapped__  # it remembers answers by the number of the card
        return not decide(0, dtype, rows, columns, inner)
    finally:
        package._gpu_dispatch_props = its_own


@functools.cache
def _package() -> Any:
    """The package's file for CUDA; None where it cannot be imported."""
    made_up: Any = not hasattr(torch._C, _RAW_STREAM)
    if made_up:
        setattr(torch._C, _RAW_STREAM, None)
    try:
        return importlib.import_module("bitsandbytes.backends.cuda.ops")
    except (ImportError, AttributeError):  # another release of it
        return None
    finally:
        if made_up:
            delattr(torch._C, _RAW_STREAM)
