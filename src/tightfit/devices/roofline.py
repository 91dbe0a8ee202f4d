"""Predicts the seconds of an operator from a device's published rates, for a device that was never measured.

The model is the roofline (Williams, Waterman, Patterson, "Roofline", CACM 2009). A kernel takes the longer of two
times: its arithmetic at the rate of its dtype, and its bytes at the rate of the memory. Kernels of each kind reach a
share of these rates. The shares were fitted to published times of steps and operators. More work never takes less time,
because every term grows with every size.
"""

import torch

from tightfit.devices.clocks import Seconds
from tightfit.devices.families import Family
from tightfit.devices.spec import Roofline
from tightfit.devices.work import ALIGNED_BYTES, HALVES, AttentionShape, ProductShape, Work, is_aligned

FLOPS_PER_MULTIPLY_ADD = 2
# Forward: two products, queries with keys and scores with values. Backward: five (FlashAttention-2, arXiv:2307.08691,
# section 3.1: the scores again, and the gradients of values, scores, queries and keys).
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
TILE = 64  # the least rows and columns that a product computes at a time
ZEROS = "copy/even/float32"

# Families whose kernels compute element by element: limited by memory, whatever the instruction.
ELEMENTWISE = {Family.ARITHMETIC, Family.TRANSCENDENTAL, Family.ERROR_FUNCTION, Family.UNEVEN}
COPYING = {Family.FILL, Family.COPY, Family.TRANSPOSE, Family.WIDENING}


class RooflineLaw:
    """Prices the work of operators by a roofline."""

    def __init__(self, roofline: Roofline):
        self.roofline, self.kernels = roofline, roofline.kernels
        self.tf32 = torch.get_float32_matmul_precision() != "highest"

    def seconds(self, work: Work) -> float:
        """Predicted seconds of this work: the longer of kernel and launch."""
        if work.family is Family.FREE or work.elements == 0:
            return 0.0
        return Seconds.of(host=self.host_seconds(work), device=self.kernel_seconds(work))

    def host_seconds(self, work: Work) -> float:
        """Predicted seconds in which the host calls this work."""
        calls = self.kernels.product_calls if work.products else work.calls
        return calls * self.kernels.launch_seconds

    def kernel_seconds(self, work: Work) -> float:
        """Predicted seconds of the device alone, without the launch."""
        if work.family is Family.FREE or work.elements == 0:
            return 0.0
        picking = work.picked_rows * self.kernels.pick_seconds
        blocks = work.block_rows * self.kernels.block_row_seconds / self.roofline.sm_count
        return self.kernels.kernel_seconds + max(self._computing(work), self._moving(work)) + picking + blocks

    def _moving(self, work: Work) -> float:
        if work.family is Family.SCATTER:
            return self._scattering(work)
        return self._stream(work.bytes, stream_of(work, self.kernels.long_row_bytes))

    def _scattering(self, work: Work) -> float:
        """Seconds to write zeros, to read sources in the order of their indices, and to write scattered rows."""
        written = sum(work.fresh_bytes)
        rows = (work.sorted_elements or work.elements) * (2 if work.dtype in HALVES else 4)
        moving = self._stream(work.bytes - written, "scatter/read") + self._stream(rows, "scatter/write")
        return self._stream(written, ZEROS) + moving + (self.kernels.scatter_seconds if work.sorted_elements else 0.0)

    def _stream(self, size: int, kind: str) -> float:
        return size / (self.roofline.memory_bytes_per_second * self.kernels.shares[kind])

    def _computing(self, work: Work) -> float:
        if work.attention is not None:
            return self._attention(work.attention, work.family is Family.ATTENTION_BACKWARD, work.dtype)
        return sum(self._product(product, work.dtype) for product in work.products)

    def _product(self, product: ProductShape, dtype: str) -> float:
        """Seconds of whole tiles, with their writes, spread over the multiprocessors, plus the beginning and the end,
        when some multiprocessors are idle.
        """
        batch, m, n, k, _ = product
        rate = self.roofline.rate(dtype, self.tf32) * self.kernels.shares[self._product_kind(dtype)]
        if dtype in HALVES and not is_aligned(product, ALIGNED_BYTES // 2):
            rate *= self.kernels.shares["product/unaligned"]
        tiles = batch * -(-m // TILE) * -(-n // TILE)
        depth = min(k, self.kernels.ramp_depth)
        depths = tiles * (k + self.kernels.tile_depth) + self.roofline.sm_count * depth
        flops = FLOPS_PER_MULTIPLY_ADD * TILE * TILE * depths
        return flops / rate

    def _product_kind(self, dtype: str) -> str:
        """The kind of units that compute a product. A dtype without its own units is computed as float32."""
        rates = self.roofline.flops_per_second
        if dtype in HALVES and dtype in rates:
            return "product/half"
        return "product/tf32" if self.tf32 and dtype not in HALVES and "tf32" in rates else "product/float32"

    def _attention(self, attention: AttentionShape, backward: bool, dtype: str) -> float:
        """Seconds of a fused kernel, which skips blocks hidden by a causal mask. Rows of blocks have a fixed cost."""
        products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
        share = self.kernels.shares["attention/backward" if backward else "attention/forward"]
        scores = attention.scores / 2 if attention.causal else attention.scores
        scores += attention.heads * attention.query_length * self.kernels.attention_ramp
        # Besides its products, each score needs an exponential.
        width = attention.width + self.kernels.exponential_width
        return FLOPS_PER_MULTIPLY_ADD * products * scores * width / (self.roofline.rate(dtype, self.tf32) * share)


def stream_of(work: Work, long_row_bytes: float) -> str:
    """The name of the share of the memory's rate that a kernel reaches for this work."""
    width = "half" if work.dtype in HALVES else "float32"
    match work.family:
        case family if family in ELEMENTWISE:
            return f"elementwise/{'even' if work.even else 'uneven'}/{work.dtype if work.dtype == 'mixed' else width}"
        case family if family in COPYING:
            turned = family is Family.TRANSPOSE or not work.even
            return f"copy/{'uneven' if turned else 'even'}/{work.dtype if work.dtype == 'mixed' else width}"
        case Family.SOFTMAX | Family.SOFTMAX_BACKWARD:
            return f"{work.family}/{'long' if work.row_bytes > long_row_bytes else 'short'}"
        case Family.PRODUCT | Family.ATTENTION | Family.ATTENTION_BACKWARD:
            return "product"
        case Family.SCAN | Family.SORT:
            return "scan"
    return str(work.family)
