"""The loss of a student: a divergence from its teacher, which runs beside it or has left a store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tightfit.levers.micro_batch import valid_tokens
from tightfit.models.compress.heads import HeadInput, head_input
from tightfit.ops import distillation_loss, hidden_state_loss, linear_cross_entropy, stored_distillation_loss
from tightfit.training.config.schema import DistilConfig
from tightfit.training.objective import VALID_TOKENS, model_inputs, next_tokens

# Of a batch from a store: tokens (B, T, k) and their weights (B, T, k); the mass of all others (B, T).
TEACHER_IDS, TEACHER_WEIGHTS, TEACHER_TAIL = "teacher_ids", "teacher_weights", "teacher_tail"
_STORED = (TEACHER_IDS, TEACHER_WEIGHTS, TEACHER_TAIL)
PROJECTION = "distillation_projection"  # of the student's last hidden states, a module of the student's meanwhile


class _OverHead:
    """A loss over the head's input, summed over tokens and divided by the valid tokens of the effective batch."""

    is_cross_entropy: ClassVar[bool] = False
    reduction: ClassVar[str] = "sum"  # of micro-batches: their losses add up as they are

    def count(self, batch: Mapping[str, Any]) -> int:
        """The valid tokens of the effective batch."""
        return batch[VALID_TOKENS]


@dataclass(frozen=True)
class DistillationLoss(_OverHead):
    """`loss(model, batch)`: the batch's share of the mean distillation loss over valid tokens, a scalar.

    `batch` is that of `CausalLMLoss`. The teacher reads the same tokens first, without gradients; of it, the hidden
    states remain. The logits of both exist for a chunk of tokens at a time.
    """

    teacher: nn.Module = field(repr=False)
    settings: DistilConfig

    @property
    def modules_beside(self) -> tuple[nn.Module, ...]:
        return (self.teacher,)

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs, labels = model_inputs(batch), next_tokens(batch["labels"])
        with torch.no_grad():
            teacher = head_input(self.teacher, inputs)
        student = head_input(model, inputs)
        if student.hidden.dtype == torch.float64:  # a verification compares with fp64
            bias = None if teacher.bias is None else teacher.bias.double()
            teacher = HeadInput(teacher.hidden.double(), teacher.weight.double(), bias, None)
        settings = self.settings
        total = distillation_loss(
            student.hidden.flatten(0, 1),
            student.weight,
            teacher.hidden.flatten(0, 1),
            teacher.weight,
            labels,
            divergence=settings.divergence,
            beta=settings.beta,
            temperature=settings.temperature,
            hard_weight=settings.hard_weight,
            bias=student.bias,
            teacher_bias=teacher.bias,
            reduction="sum",
        )
        if settings.hidden_weight:
            projection = getattr(model, PROJECTION, None)
            total = total + settings.hidden_weight * hidden_state_loss(
                student.hidden.flatten(0, 1),
                teacher.hidden.flatten(0, 1),
                labels,
                projection=None if projection is None else projection.weight,
                reduction="sum",
            )
        return _share(total, student.auxiliary, labels, batch)


@dataclass(frozen=True)
class StoredDistillationLoss(_OverHead):
    """`loss(model, batch)`: the same from what a store keeps of the teacher's distributions, without a teacher.

    `batch` also has `teacher_ids` (B, T, k) int32, `teacher_weights` (B, T, k) fp16 and, of the likeliest tokens,
    `teacher_tail` (B, T) fp32.
    """

    settings: DistilConfig

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = {name: value for name, value in model_inputs(batch).items() if name not in _STORED}
        labels = next_tokens(batch["labels"])
        student = head_input(model, inputs)
        tail = batch.get(TEACHER_TAIL)
        total = stored_distillation_loss(
            student.hidden.flatten(0, 1),
            student.weight,
            batch[TEACHER_IDS].flatten(0, 1),
            batch[TEACHER_WEIGHTS].flatten(0, 1),
            labels,
            tail_weight=None if tail is None else tail.flatten(),
            temperature=self.settings.temperature,
            hard_weight=self.settings.hard_weight,
            bias=student.bias,
            reduction="sum",
        )
        return _share(total, student.auxiliary, labels, batch)


@dataclass(frozen=True)
class HeldOutLoss(_OverHead):
    """`loss(model, batch)`: the cross-entropy of next tokens, whatever the student minimises: its exponential is the
    perplexity. In chunks of the head, so that an evaluation needs no more memory than a training step.
    """

    is_cross_entropy: ClassVar[bool] = True

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = {name: value for name, value in model_inputs(batch).items() if name not in _STORED}
        labels = next_tokens(batch["labels"])
        student = head_input(model, inputs)
        total = linear_cross_entropy(
            student.hidden.flatten(0, 1), student.weight, labels, bias=student.bias, reduction="sum"
        )
        return _share(total, student.auxiliary, labels, batch)


def _share(total: Tensor, auxiliary: Tensor | None, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """A sum over tokens, with what experts add for each, as a share of the mean over the effective batch."""
    if auxiliary is not None:
        total = total + auxiliary * (labels >= 0).sum()
    divisor = batch[VALID_TOKENS] if VALID_TOKENS in batch else valid_tokens(batch)
    return total / max(divisor, 1)
