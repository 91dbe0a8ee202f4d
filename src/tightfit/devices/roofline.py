"""Seconds of an operator from a device's published rates, for a device that was never measured.

The model is the roofline: a kernel takes as long as its arithmetic at the rate of its dtype, or as its bytes at the
memory's rate, whichever is longer (Williams, Waterman, Patterson, "Roofline", CACM 2009); and never less than its
launch, since eager code launches one kernel after the other. Sorts and scattered writes are priced by their bytes too.
"""

import torch

from tightfit.devices.families import Family
from tightfit.devices.spec import Roofline
from tightfit.devices.work import AttentionShape, Work

FLOPS_PER_MULTIPLY_ADD = 2
# Forward: two products, queries with keys and scores with values. Backward: five (FlashAttention-2, arXiv:2307.08691,
# section 3.1: the scores again, and the gradients of values, scores, queries and keys).
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5


class RooflineLaw:
    """Prices the work of operators by a roofline."""

    def __init__(self, roofline: Roofline):
        self.roofline = roofline
        self.tf32 = torch.get_float32_matmul_precision() != "highest"

    def seconds(self, work: Work) -> float:
        """Predicted seconds of this work: its kernel's, or its launch's where that takes longer."""
        if work.family is Family.FREE or work.elements == 0:
            return 0.0
        moving = work.bytes / (self.roofline.memory_bytes_per_second * self.roofline.stream_share)
        return max(self._computing(work), moving, self.roofline.launch_seconds)

    def _computing(self, work: Work) -> float:
        if work.attention is not None:
            return self._attention(work.attention, work.family is Family.ATTENTION_BACKWARD, work.dtype)
        multiply_adds = sum(product.multiply_adds for product in work.products)
        rate = self.roofline.rate(work.dtype, self.tf32)
        return FLOPS_PER_MULTIPLY_ADD * multiply_adds / (rate * self.roofline.product_share)

    def _attention(self, attention: AttentionShape, backward: bool, dtype: str) -> float:
        """A causal mask lets a fused kernel leave out the half that it hides."""
        products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
        share = self.roofline.attention_backward_share if backward else self.roofline.attention_share
        scores = attention.scores / 2 if attention.causal else attention.scores
        flops = FLOPS_PER_MULTIPLY_ADD * products * scores * attention.width
        return flops / (self.roofline.rate(dtype, self.tf32) * share)
