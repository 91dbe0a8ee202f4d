"""Losses over a head's logits as Liger-Kernel's tests compute them for plain PyTorch, written anew."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Configuration = Mapping[str, Any]
Measured = Callable[[], Any]
IGNORED = -100


def head(c: Configuration, width: int) -> Tensor:
    return torch.randn(c["V"], width, dtype=getattr(torch, c["dtype"])).requires_grad_()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED)


def preference(align: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Configuration, str, str], Measured]:
    """A loss over pairs of sequences: cross-entropy of the first half, and what aligns both halves' log-likelihoods."""

    def script(c: Configuration, mode: str, provider: str) -> Measured:
        weight, other = head(c, c["H"]), head(c, c["H"])
        given = torch.randn(c["B"], c["T"], c["H"], dtype=weight.dtype, requires_grad=True)
        target = torch.randint(c["V"], (c["B"], c["T"]))

        def likelihoods(logits: Tensor, labels: Tensor) -> Tensor:
            mask = labels != IGNORED
            labels = torch.where(labels == IGNORED, 0, labels)
            each = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
            return (each * mask).sum(-1) / mask.sum(-1)

        def compared() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            chosen = given.shape[0] // 2
            outputs = given @ weight.t()
            logits = outputs.float()
            loss = cross_entropy(logits[:chosen], target[:chosen])
            every = likelihoods(logits, target)
            return every[:chosen], every[chosen:], logits[:chosen], logits[chosen:], loss

        def forward() -> Tensor:
            results = compared()
            chosen, rejected, _, _, loss = results
            return loss - align(chosen, rejected).mean()

        def run() -> None:
            assert other is not None  # the other implementation's head lives too
            forward().backward()

        return run

    return script


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * F.logsigmoid(odds)


def contrastive(chosen: Tensor, rejected: Tensor) -> Tensor:
    logits = chosen - rejected
    return F.logsigmoid(0.1 * logits) * 1.0 + F.logsigmoid(-0.1 * logits) * 0.0


def with_margin(chosen: Tensor, rejected: Tensor) -> Tensor:
    logits = chosen - rejected
    logits = logits - (0.5 / 0.1)
    return F.logsigmoid(0.1 * logits) * 1.0 + F.logsigmoid(-0.1 * logits) * 0.0


def distillation(soft: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Configuration, str, str], Measured]:
    """A student of half the teacher's width: cross-entropy, and a loss between both logits."""

    def script(c: Configuration, mode: str, provider: str) -> Measured:
        student, teacher = head(c, c["H"] // 2), head(c, c["H"])
        others = head(c, c["H"] // 2), head(c, c["H"])
        one = torch.rand(c["BT"], c["H"] // 2, dtype=student.dtype)
        held = [one, one.detach().clone().requires_grad_(True), *others]
        given = one.detach().clone().requires_grad_(True)
        teacher_in = torch.rand(c["BT"], c["H"], dtype=student.dtype)
        target = torch.randint(0, c["V"], (c["BT"],))

        def logits_and_loss() -> tuple[Tensor, Tensor, Tensor]:
            outputs = given @ student.t()
            with torch.no_grad():
                teacher_outputs = teacher_in @ teacher.t()
            logits = outputs.view(len(given), -1).float()
            teacher_logits = teacher_outputs.view(len(given), -1).float()
            return logits, teacher_logits, cross_entropy(logits, target)

        def forward() -> Tensor:
            results = logits_and_loss()
            logits, teacher_logits, hard = results
            logits /= 1.0
            teacher_logits /= 1.0
            return c["weight_hard_loss"] * hard + c["weight_soft_loss"] * soft(logits, teacher_logits)

        def run() -> None:
            assert held
            forward().backward()

        return run

    return script


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    left, right = F.log_softmax(student, dim=-1), F.log_softmax(teacher, dim=-1)
    mean = beta * left.exp() + (1 - beta) * right.exp()
    log_mean = mean.log()
    student_kl = F.kl_div(log_mean, left, reduction="batchmean", log_target=True)
    teacher_kl = F.kl_div(log_mean, right, reduction="batchmean", log_target=True)
    return beta * teacher_kl + (1 - beta) * student_kl


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    left, right = F.normalize(student, p=2, dim=-1), F.normalize(teacher, p=2, dim=-1)
    similarity = F.cosine_similarity(left, right, dim=-1)
    loss = 1.0 * (1 - similarity)
    return loss.mean()


def softcapped(c: Configuration, mode: str, provider: str) -> Measured:
    """Cut cross-entropy's baseline: capped logits of a head in fp32."""
    dtype = getattr(torch, c["dtype"])
    embedding = torch.randn(c["tokens"], c["H"], dtype=dtype, requires_grad=True)
    classifier = torch.randn(c["V"], c["H"], dtype=dtype, requires_grad=True)
    target = torch.randint(c["V"], (c["tokens"],))

    def forward() -> Tensor:
        logits = embedding @ classifier.T
        logits = torch.tanh(logits / c["softcap"]) * c["softcap"]
        return F.cross_entropy(logits.float(), target, ignore_index=IGNORED)

    def run() -> Any:
        embedding.grad = classifier.grad = None
        loss = forward()
        return loss if mode == "forward" else loss.backward()

    return run


HEAD_LOSSES: dict[str, Callable[[Configuration, str, str], Measured]] = {
    "cut_cross_entropy": softcapped,
    "distill_cosine_loss": distillation(cosine),
    "distill_jsd_loss": distillation(jensen_shannon),
    "fused_linear_cpo_loss": preference(contrastive),
    "fused_linear_orpo_loss": preference(odds_ratio),
    "fused_linear_simpo_loss": preference(with_margin),
}
