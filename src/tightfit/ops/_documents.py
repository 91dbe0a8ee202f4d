"""Finds the documents of packed rows, and computes causal attention on a CPU for one document at a time.

PyTorch's fused kernel runs once per document: nothing is computed for pairs of different documents, and no mask is
allocated. The result of a document depends only on its own tokens.
"""

from typing import Any

import torch
from torch import Tensor

from tightfit.ops._once import differentiable_once
from tightfit.runtime.simulation import simulation

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves_documents(tensor: Tensor) -> bool:
    """True if attention over such a tensor runs one document at a time.

    It does on a CPU, except in compiled code, which would be recompiled for other document lengths.
    """
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu" and not simulation.of_cuda


def runs(document_ids: Tensor) -> list[tuple[int, int, int]] | None:
    """Row, begin and end of each document of ids (B, T); None if the ids descend within a row."""
    if not _ascend(document_ids):
        return None
    found, length = [], document_ids.shape[1]
    places = _begins(document_ids).nonzero().tolist()
    for (row, begin), following in zip(places, [*places[1:], (-1, 0)], strict=True):
        found.append((row, begin, following[1] if following[0] == row else length))
    return found


def earliest_keys(document_ids: Tensor) -> list[int] | None:
    """For each position the first position of its document, the minimum over all rows; None as for `runs`."""
    if not _ascend(document_ids):
        return None
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    return (places * _begins(document_ids)).cummax(dim=1).values.amin(dim=0).tolist()


def _ascend(document_ids: Tensor) -> bool:
    return not bool((document_ids[:, 1:] < document_ids[:, :-1]).any())


def _begins(document_ids: Tensor) -> Tensor:
    """(B, T), True where a document begins."""
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return begins


class DocumentAttention(torch.autograd.Function):
    """See `attention`. Saves the inputs, the output and one log-sum-exp per query."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: list[tuple[int, int, int]], scale: float
    ) -> Tensor:
        batch, heads, length, width = q.shape
        # (batch, length, heads, width) in memory, as in the kernel's own result, so that later operations need no copy
        out = q.new_empty(batch, length, heads, width).transpose(1, 2)
        sums = q.new_empty(batch, length, heads, dtype=_sum_dtype(q)).transpose(1, 2)
        for part in map(_Part, documents):
            part_out, part_sums = _FORWARD(part.of(q), part.of(k), part.of(v), 0.0, True, scale=scale)
            part.of(out).copy_(part_out)
            part.of(sums).copy_(part_sums)
        # Writes nothing, and gives what a plan may keep a name that is the same for any number of documents: the last
        # copy's number is another one in each batch.
        for whole in (out, sums):
            whole[:0].mul_(1)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.how = documents, scale
        return out

    @staticmethod
    @differentiable_once("attention")
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        documents, scale = ctx.how
        made = [torch.empty_like(each) for each in (q, k, v)]
        for part in map(_Part, documents):
            inputs = [part.of(each) for each in (gradients[0], q, k, v, out, sums)]
            for whole, own in zip(made, _BACKWARD(*inputs, 0.0, True, scale=scale), strict=True):
                part.of(whole).copy_(own)
        return (*made, None, None)


class _Part:
    """A document's place in tensors (B, heads, T, ...)."""

    def __init__(self, document: tuple[int, int, int]):
        self.row, self.begin, self.end = document

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.row : self.row + 1, :, self.begin : self.end]


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
