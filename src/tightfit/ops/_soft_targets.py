"""Soft targets of a chunk's tokens: divergences of two distributions, with a temperature, mixed with hard labels.

The gradient of each is that with respect to the student's logits. It overwrites them, as in the other losses over a
linear head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from tightfit.errors import InputError

# A chunk's tokens are worked on in this many parts: what is computed beside its logits is as large as a part.
PARTS_OF_A_CHUNK = 8

# From student's and teacher's logits over the temperature (rows, V): the losses (rows,). The gradient overwrites the
# student's logits. The teacher's may be overwritten.
Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mix:
    """The weights of a token's loss: (1 - hard_weight) * temperature² * divergence + hard_weight * cross-entropy.

    The gradient of a divergence of softened distributions shrinks with the square of the temperature. The factor makes
    up for that (Hinton et al. 2015).
    """

    temperature: float
    hard_weight: float

    def losses_(
        self, logits: Tensor, labels: Tensor, scale: Tensor | None, divergence: Callable[[Tensor, slice], Tensor]
    ) -> Tensor:
        """The losses (rows,) of `logits` (rows, V) and `labels` (rows,), a part of the rows at a time.

        `divergence` gets logits over the temperature, and their place in `logits`. It overwrites them by its gradient,
        and returns its losses. With `scale` (rows, 1), the logits become the gradient of the mixed losses, times
        `scale`.
        """
        found = []
        for part in parts(len(logits)):
            student, of_part = logits[part], labels[part].unsqueeze(1)
            hard = Hard.of(student, of_part) if self.hard_weight else None
            losses = divergence(self.softened_(student), part) * ((1 - self.hard_weight) * self.temperature**2)
            if hard is not None:
                losses = losses + self.hard_weight * hard.losses
            found.append(losses)
            if scale is not None:
                student.mul_(scale[part] * ((1 - self.hard_weight) * self.temperature))
                if hard is not None:
                    hard.add_gradient_(student, of_part, scale[part] * self.hard_weight)
        return torch.cat(found)

    def softened_(self, logits: Tensor) -> Tensor:
        """The logits over the temperature, in place."""
        return logits if self.temperature == 1 else logits.div_(self.temperature)


def check_mix(name: str, mix: Mix) -> None:
    if not 0 < mix.temperature < inf:
        raise InputError(f"{name}: temperature={mix.temperature} is not above 0")
    if not 0 <= mix.hard_weight <= 1:
        raise InputError(f"{name}: hard_weight={mix.hard_weight} is not between 0 and 1")


def parts(rows: int) -> Iterator[slice]:
    size = max(rows // PARTS_OF_A_CHUNK, 1)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


class Hard(NamedTuple):
    """The cross-entropy of each label (rows,), and the log-probabilities (rows, V)."""

    losses: Tensor
    log_q: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> "Hard":
        log_q = logits.log_softmax(dim=1)
        return cls(-log_q.gather(1, labels).squeeze(1), log_q)

    def add_gradient_(self, gradient: Tensor, labels: Tensor, scale: Tensor) -> None:
        """Add d loss / d l = softmax(l) - [v = y], times `scale`. The log-probabilities are overwritten."""
        gradient.add_(self.log_q.exp_().mul_(scale))
        # Each row has one label, so a plain scatter is deterministic on every device.
        gradient.scatter_(1, labels, gradient.gather(1, labels) - scale)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p, q) = sum p (log p - log q) for the teacher's p and the student's q; d / d z = q - p."""
    log_q, log_p = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    p = torch.exp(log_p, out=teacher)
    losses = log_p.sub_(log_q).mul_(p).sum(dim=1)
    torch.exp(log_q, out=student).sub_(p)
    return losses


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(q, p) = sum q (log q - log p); d / d z = q (log q - log p - KL(q, p))."""
    log_q, log_p = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    gap = log_p.neg_().add_(log_q)
    q = log_q.exp_()
    losses = torch.mul(q, gap, out=student).sum(dim=1, keepdim=True)
    torch.mul(q, gap.sub_(losses), out=student)
    return losses.squeeze(1)


def jensen_shannon(beta: float) -> Divergence:
    """beta KL(p, m) + (1 - beta) KL(q, m) for the mixture m = beta p + (1 - beta) q, and `beta` inside (0, 1).

    d / d z = (1 - beta) q (log q - log m - KL(q, m)).
    """

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        log_q, log_p = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
        torch.add(log_q, log(1 - beta), out=student)
        torch.add(log_p, log(beta), out=teacher)
        log_m = torch.logaddexp(student, teacher)
        p = torch.exp(log_p, out=teacher)
        of_teacher = log_p.sub_(log_m).mul_(p).sum(dim=1)
        gap = log_m.neg_().add_(log_q)
        q = log_q.exp_()
        of_student = torch.mul(q, gap, out=student).sum(dim=1, keepdim=True)
        torch.mul(q, gap.sub_(of_student), out=student).mul_(1 - beta)
        return beta * of_teacher + (1 - beta) * of_student.squeeze(1)

    return divergence


def mean_square(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over the vocabulary of (z - t)²; d / d z = 2 (z - t) / V."""
    gap = student.sub_(teacher)
    losses = torch.mul(gap, gap, out=teacher).mean(dim=1)
    gap.mul_(2 / gap.shape[1])
    return losses


def divergence_of(name: str, beta: float) -> Divergence:
    """A divergence by its name. At the ends of `beta`, JSD is a KL divergence, as in TRL."""
    ends = {0.0: forward_kl, 1.0: reverse_kl}
    jsd = ends[beta] if beta in ends else jensen_shannon(beta)
    return {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "logits_mse": mean_square}[name]
