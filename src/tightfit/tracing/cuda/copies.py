"""Copies that CUDA's kernels make of operands that lie otherwise, and numbers that they hold beside their results.

Each was compared with what PyTorch's own code allocates, layout by layout (tests/card/test_copied_operands.py).
"""

from collections.abc import Callable, Sequence
from functools import partial

from tightfit.tracing.cuda.allocator import RESULT
from tightfit.tracing.shapes import TensorShape

Shapes = Sequence[TensorShape]

# Their first operand is made contiguous once the results have their memory: `input.contiguous()` in ReflectionPad.cu,
# TensorTopK.cpp, ScanKernels.cpp, RreluWithNoise.cu, AveragePool3d.cu, UpSampleBicubic2d.cu.
_AFTER = (
    "aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.topk.default", "aten.cummax.default",
    "aten.cummin.default", "aten.logcumsumexp.default", "aten.rrelu_with_noise.default",
    "aten.avg_pool3d_backward.default", "aten.upsample_bicubic2d_backward.default",
)  # fmt: skip
# The same before: Sorting.cpp
_BEFORE = ("aten.median.dim", "aten.kthvalue.default")


def _copied(inputs: Shapes) -> list[int]:
    return [shape.bytes for shape in inputs if not shape.is_contiguous]


def _after(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return [*[RESULT] * len(outputs), *_copied(inputs[:1])]


def _before(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return [*_copied(inputs[:1]), *[RESULT] * len(outputs)]


def _largest_of_places(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `adaptive_max_pool2d_out_cuda` in AdaptiveMaxPooling2d.cu: results that lie otherwise are made beside
    return [RESULT, RESULT, *_copied(outputs), *_copied(inputs)]


def _largest_of_places_backward(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    gradient, _, places = inputs
    return [RESULT, *_copied((gradient, places)), *_copied(outputs)]


def _mode(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `mode_kernel_impl` in TensorModeKernel.cpp: values and their places are sorted in a copy
    return [RESULT, RESULT, inputs[0].bytes]


def _roll(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `roll_cuda` in TensorTransformations.cu, `roll_common`: one dimension after the other, each into new memory
    dims = arguments[1] if len(arguments) > 1 else ()
    blocks = held = _copied(inputs[:1])
    for _ in dims[1:]:
        made = [outputs[0].bytes]
        blocks, held = [*blocks, *made, *(-size for size in held)], made
    return [*blocks, RESULT]


def _patches(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `im2col_cuda` in Im2Col.cu: memory for as much as the input, which is too little, and is given back
    return [inputs[0].bytes, *_copied(inputs[:1]), RESULT]


def _magnitude(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `unary_op_impl_with_complex_to_float_out` in native/UnaryOps.cpp: complex numbers whose real parts are the result
    return [RESULT, inputs[0].bytes] if inputs[0].dtype.is_complex else [RESULT]


def _angle(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return [inputs[0].bytes, RESULT] if inputs[0].dtype.is_complex else [RESULT]


def _scattered(result: list[int], inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `masked_scatter_cuda_impl` in IndexKernel.cpp: for each place how many come before it, as 64-bit integers, which
    # cub counts in tiles (of 896, as PyTorch's build does it)
    target, mask, source = inputs
    counting = 16 * (-(-target.numel // 896) + 64)
    copied = [target.numel] if mask.numel != target.numel or not mask.is_contiguous else []
    return [*result, 8 * target.numel, *copied, counting, -counting, *_copied([source])]


def _distances(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    return [*_copied(inputs[:2]), RESULT]  # `cdist_impl` in native/Distance.cpp


def _distances_by_products(inputs: Shapes, outputs: Shapes, arguments: tuple) -> list[int]:
    # `_euclidean_dist` in native/Distance.cpp: squares of both and their sums, and both with two columns more
    blocks: list[int] = []
    for rows in inputs[:2]:
        one = rows.bytes // rows.shape[-1]
        blocks += [rows.bytes, one, -rows.bytes, one]
    wide = [rows.bytes // rows.shape[-1] * (rows.shape[-1] + 2) for rows in inputs[:2]]
    sums = [rows.bytes // rows.shape[-1] for rows in inputs[:2]]
    first = inputs[0].bytes
    return [*blocks, first, wide[0], *[-sums[0]] * 2, -first, wide[1], *[-sums[1]] * 2, RESULT]


FORMULAS: dict[str, Callable[[Shapes, Shapes, tuple], list[int]]] = {
    **dict.fromkeys(_AFTER, _after),
    **dict.fromkeys(_BEFORE, _before),
    "aten.adaptive_max_pool2d.default": _largest_of_places,
    "aten.adaptive_max_pool2d_backward.default": _largest_of_places_backward,
    "aten.mode.default": _mode,
    "aten.roll.default": _roll,
    "aten.im2col.default": _patches,
    "aten.abs.default": _magnitude,
    "aten.angle.default": _angle,
    "aten.masked_scatter.default": partial(_scattered, [RESULT]),
    "aten.masked_scatter_.default": partial(_scattered, []),
    "aten._cdist_forward.default": _distances,
    "aten._euclidean_dist.default": _distances_by_products,
}
