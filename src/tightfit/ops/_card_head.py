"""The chunk loop of cross-entropy for 16-bit products on a card: three products a chunk, three passes between them.

The general loop (`_chunked_head.py`) is made for CPUs, where passes in place and small buffers pay. On a card launches
and bytes decide. The product itself writes fp32 logits, so nothing is widened afterwards. One fused operator makes
their log-softmax, and its exponential is the gradient, rounded to 16 bits once. The product of the weight's gradient
adds to the sum of the chunks before, in fp32. The gradients are those of the sum of the losses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightfit.ops._chunked_head import Gradients, Head, Tokens, on_cuda, widened_product

CHUNKS = 32  # of a batch. More of them read and write the weight's gradient more often, fewer take more memory.
LEAST_ROWS = 512  # of a chunk: the tiles of a product have as many


def rows_on_a_card(tokens: int) -> int:
    """The number of tokens in a chunk."""
    return max(-(-tokens // CHUNKS), LEAST_ROWS)


def waits(tokens: int, weight: Tensor) -> bool:
    """True if the weight's gradient is one product at the end, of the logits' gradients of all tokens.

    These take 2 V N bytes, and a sum in fp32 takes 4 V D. A gradient that is fp32 anyway is its own sum. In fp16 the
    division by the number of tokens has to wait for backward.
    """
    return weight.dtype == torch.bfloat16 and tokens <= 2 * weight.shape[1]


def run_chunks_on_a_card(
    head: Head, tokens: Tokens, rows: int, weight_dtype: torch.dtype, divisor: int, needed: Sequence[bool]
) -> tuple[Gradients, Tensor, bool]:
    """The gradients of the sum of the losses, of hidden and weight as `needed`, and the losses (count,) in fp64.

    Also says whether the weight's gradient is divided by `divisor` already. The head has no bias, and its products are
    in 16 bits. `weight_dtype` is the weight's own dtype.
    """
    rows = max(min(rows, tokens.count), 1)
    vocabulary, device = len(head.weight), head.hidden.device
    is_last = needed[1] and weight_dtype == head.weight.dtype and waits(tokens.count, head.weight)
    wide, log_wide = (torch.empty((rows, vocabulary), dtype=torch.float32, device=device) for _ in range(2))
    held = tokens.count if is_last else rows
    narrow = torch.empty((held, vocabulary), dtype=head.weight.dtype, device=device)
    losses = torch.empty(tokens.count, dtype=torch.float64, device=device)
    of_hidden = torch.empty_like(head.hidden, dtype=torch.float32) if needed[0] else None
    of_weight = torch.empty_like(head.weight, dtype=torch.float32) if needed[1] and not is_last else None
    if of_hidden is not None and tokens.positions is not None:
        of_hidden.zero_()  # tokens that are not counted
    if of_weight is not None and not tokens.count:
        of_weight.zero_()
    for start, stop in tokens.chunks(rows):
        count, labels = stop - start, tokens.labels[start:stop].unsqueeze(1)
        hidden = tokens.gather(head.hidden, start, stop).to(narrow.dtype)
        product_(wide[:count], hidden, head.weight.t())
        gradient = narrow[start:stop] if is_last else narrow[:count]
        losses[start:stop] = loss_and_gradient_(wide[:count], log_wide[:count], gradient, labels)
        if of_hidden is not None:
            tokens.scatter_(of_hidden, start, stop, widened_product(gradient, head.weight, torch.float32))
        if of_weight is not None:
            (product_ if start == 0 else add_product_)(of_weight, gradient.t(), hidden)
    if is_last:
        del wide, log_wide
        of_weight = torch.empty_like(head.weight)
        hidden = tokens.gather(head.hidden).to(narrow.dtype)
        torch.addmm(of_weight, narrow.t(), hidden, beta=0, alpha=1 / divisor, out=of_weight)
    return Gradients(of_hidden, of_weight, None), losses, is_last


def loss_and_gradient_(logits: Tensor, log_p: Tensor, gradient: Tensor, labels: Tensor) -> Tensor:
    """The losses (rows,) of logits (rows, V). Fills `log_p` with their log-softmax, and `gradient` in 16 bits."""
    torch.log_softmax(logits, 1, out=log_p)
    of_labels = log_p.gather(1, labels)
    torch.exp(log_p, out=gradient)
    # p - 1 in the label's own column, rounded once
    gradient.scatter_(1, labels, torch.expm1(of_labels).to(gradient.dtype))
    return -of_labels.squeeze(1)


def product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right of 16-bit operands, in fp32."""
    if on_cuda(out):
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:  # a CPU has no kernel for `out_dtype`
        torch.mm(left.float(), right.float(), out=out)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right of 16-bit operands, with a sum in fp32."""
    if on_cuda(total):
        torch.addmm(total, left, right, torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
