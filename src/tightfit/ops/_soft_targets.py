"""Soft targets of a chunk's tokens: divergences of two distributions, with a temperature, mixed with hard labels.

The gradient of each is that with respect to the student's logits. It overwrites them, as in the other losses over a
linear head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.errors import InputError

# A chunk's tokens are worked on in this many parts: what is computed beside its logits is as large as a part.
PARTS_OF_A_CHUNK = 8


class Diverged(NamedTuple):
    """The losses (rows,) of a divergence, and the factor of the gradient that has overwritten the student's logits.

    A factor that is common to all elements is rounded once, with the others of `Mix`: its error would not average out.
    """

    losses: Tensor
    factor: float = 1.0


# Of the student's and the teacher's logits over the temperature (rows, V), both overwritten.
Divergence = Callable[[Tensor, Tensor], Diverged]


@dataclass(frozen=True)
class Mix:
    """The weights of a token's loss: (1 - hard_weight) * temperature² * divergence + hard_weight * cross-entropy.

    The gradient of a divergence of softened distributions shrinks with the square of the temperature. The factor makes
    up for that (Hinton et al. 2015).
    """

    temperature: float
    hard_weight: float

    def losses_(
        self, logits: Tensor, labels: Tensor, scale: Tensor | None, divergence: Callable[[Tensor, slice], Diverged]
    ) -> Tensor:
        """The losses (rows,) of `logits` (rows, V) and `labels` (rows,), a part of the rows at a time.

        `divergence` gets logits over the temperature, and their place in `logits`. It overwrites them by its gradient.
        With `scale` (rows, 1), the logits become the gradient of the mixed losses, times
        `scale`.
        """
        found = []
        for part in parts(len(logits)):
            student, of_part = logits[part], labels[part].unsqueeze(1)
            hard = Hard.of(student, of_part) if self.hard_weight else None
            soft = divergence(self.softened_(student), part)
            losses = soft.losses.double() * ((1 - self.hard_weight) * self.temperature**2)
            if hard is not None:
                losses = losses + self.hard_weight * hard.losses
            found.append(losses)
            if scale is not None:
                factor = scale[part].double() * ((1 - self.hard_weight) * self.temperature * soft.factor)
                student.mul_(factor.to(student.dtype))
                if hard is not None:
                    pull = scale[part].double() * self.hard_weight
                    hard.add_gradient_(student, of_part, pull.to(student.dtype))
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


class Exponentials(NamedTuple):
    """exp(z - the largest z) of each row (rows, V), their sum in fp64, and its logarithm (rows, 1)."""

    values: Tensor
    total: Tensor
    log_total: Tensor

    @classmethod
    def of_(cls, logits: Tensor) -> "Exponentials":
        """Those of `logits`, which become z - the largest z."""
        # As in `_label_loss`. Logarithms of sums stay out of the elements: rounded there, they would move a whole row.
        logits.sub_(logits.amax(dim=1, keepdim=True))
        values = logits.exp()
        total = values.sum(dim=1, keepdim=True).double()
        return cls(values, total, total.log())

    def probabilities_(self) -> Tensor:
        return self.values.mul_((1 / self.total).to(self.values.dtype))

    def mean(self, products: Tensor) -> Tensor:
        """The expectation (rows, 1) in fp64 of a value, from its products with `values`."""
        return products.sum(dim=1, keepdim=True).double() / self.total


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


def forward_kl(student: Tensor, teacher: Tensor) -> Diverged:
    """KL(p, q) = sum p (log p - log q) for the teacher's p and the student's q; d / d z = q - p."""
    q, p = Exponentials.of_(student), Exponentials.of_(teacher)
    gap = teacher.sub_(student)
    losses = p.mean(gap.mul_(p.values)) + q.log_total - p.log_total
    torch.sub(q.probabilities_(), p.probabilities_(), out=student)
    return Diverged(losses.squeeze(1))


def reverse_kl(student: Tensor, teacher: Tensor) -> Diverged:
    """KL(q, p) = sum q (log q - log p); d / d z = q (log q - log p - KL(q, p))."""
    q, p = Exponentials.of_(student), Exponentials.of_(teacher)
    gap = torch.sub(student, teacher, out=teacher)
    mean = q.mean(torch.mul(q.values, gap, out=student))
    torch.mul(q.probabilities_(), gap.sub_(mean.to(gap.dtype)), out=student)
    return Diverged((mean + p.log_total - q.log_total).squeeze(1))


def jensen_shannon(beta: float) -> Divergence:
    """beta KL(p, m) + (1 - beta) KL(q, m) for the mixture m = beta p + (1 - beta) q, and `beta` inside (0, 1).

    With d = log p - log q and a = log m - log q = log((1 - beta) + beta exp(d)), it is beta sum p (d - a) - (1 - beta)
    sum q a, and d / d z = (1 - beta) q (sum q a - a).
    """

    def divergence(student: Tensor, teacher: Tensor) -> Diverged:
        q, p = Exponentials.of_(student), Exponentials.of_(teacher)
        gap = teacher.sub_(student).add_((q.log_total - p.log_total).to(teacher.dtype))
        # log((1 - beta) + beta exp(d)) without an overflow. Beyond 40, log(1 + exp(x)) is x in fp64 too.
        shift = torch.add(gap, log(beta) - log(1 - beta), out=student)
        of_mixture = F.softplus(shift, threshold=40).add_(log(1 - beta))
        of_teacher = p.mean(gap.sub_(of_mixture).mul_(p.values))
        of_student = q.mean(torch.mul(of_mixture, q.values, out=student))
        of_mixture.neg_().add_(of_student.to(gap.dtype))
        torch.mul(q.probabilities_(), of_mixture, out=student)
        return Diverged((beta * of_teacher - (1 - beta) * of_student).squeeze(1), 1 - beta)

    return divergence


def mean_square(student: Tensor, teacher: Tensor) -> Diverged:
    """The mean over the vocabulary of (z - t)²; d / d z = 2 (z - t) / V."""
    gap = student.sub_(teacher)
    return Diverged(torch.mul(gap, gap, out=teacher).mean(dim=1), 2 / gap.shape[1])


def divergence_of(name: str, beta: float) -> Divergence:
    """A divergence by its name. At the ends of `beta`, JSD is a KL divergence, as in TRL."""
    ends = {0.0: forward_kl, 1.0: reverse_kl}
    jsd = ends[beta] if beta in ends else jensen_shannon(beta)
    return {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd, "logits_mse": mean_square}[name]
