"""Cross-entropy with labels, label smoothing and z-loss, of a chunk's logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tightfit.ops._chunked_head import Chunk, ChunkLoss, Head, Tokens


@dataclass(frozen=True)
class LabelLoss:
    """The terms of a token's loss: label smoothing and z-loss."""

    label_smoothing: float
    z_loss: float
    name: ClassVar[str] = "linear_cross_entropy"
    takes_wide_scale: ClassVar[bool] = False

    @property
    def is_plain(self) -> bool:
        """True if this is the cross-entropy alone."""
        return not self.label_smoothing and not self.z_loss

    def of_chunks(self, head: Head, tokens: Tokens, rows: int, targets: Sequence[Tensor | None]) -> ChunkLoss:
        def of_chunk(chunk: Chunk, scale: Tensor | None) -> Tensor:
            labels = tokens.labels[chunk.start : chunk.stop].unsqueeze(1)
            if scale is None:
                return loss_(chunk.logits, labels, self).loss
            return loss_and_gradient_(chunk.logits, labels, self, scale)

        return of_chunk


@dataclass(frozen=True)
class Softmax:
    """For each token: its loss (rows,), the sum of the exponentials in the buffer, and its log-sum-exp (rows, 1)."""

    loss: Tensor
    total: Tensor
    log_total: Tensor


def loss_(logits: Tensor, labels: Tensor, terms: LabelLoss) -> Softmax:
    """The loss of each row of `logits`, which are overwritten by exp(logits - their maximum)."""
    # In place throughout: the logits are the largest tensor here, and nothing reads them afterwards.
    highest = logits.amax(dim=1, keepdim=True)
    logits.sub_(highest)  # so that no exponential overflows
    target = logits.gather(1, labels)
    mean = logits.mean(dim=1, keepdim=True) if terms.label_smoothing else None
    total = logits.exp_().sum(dim=1, keepdim=True).double()
    shifted = total.log()
    loss = shifted - target
    if mean is not None:
        loss = (1 - terms.label_smoothing) * loss + terms.label_smoothing * (shifted - mean)
    log_total = shifted + highest
    if terms.z_loss:
        loss = loss + terms.z_loss * log_total.square()
    return Softmax(loss.squeeze(1), total, log_total)


def loss_and_gradient_(logits: Tensor, labels: Tensor, terms: LabelLoss, scale: Tensor) -> Tensor:
    """The loss of each row of `logits`, which are overwritten by its gradient times `scale` (rows, 1).

    d loss / d l_v = p_v (1 + 2 z lse) - (1 - e) [v = y] - e / V, for smoothing e and z-loss z.
    """
    softmax = loss_(logits, labels, terms)
    # The buffer now holds exponentials. One multiplication makes them scaled probabilities.
    pull = scale * (1 + 2 * terms.z_loss * softmax.log_total) if terms.z_loss else scale
    logits.mul_((pull / softmax.total).to(logits.dtype))
    if terms.label_smoothing:
        logits.sub_(scale * (terms.label_smoothing / logits.shape[1]))
    # Each row has one label, so a plain scatter is deterministic on every device.
    logits.scatter_(1, labels, logits.gather(1, labels) - (1 - terms.label_smoothing) * scale)
    return softmax.loss
