"""`estimate --inference`: the memory and the time of reading a prompt and generating text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tightfit.cli.question import SIZE, Question
from tightfit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from tightfit.cli.subject import Subject
    from tightfit.planner.any_code.records import GenerationRecord

NEW_TOKENS = 128  # where a question gives no number

# Options of `estimate` that say how a model is trained.
OF_TRAINING = {
    "optimizer": "--optimizer",
    "step_in_backward": "--step-in-backward",
    "micro_batches": "--micro-batches",
    "grad_clip": "--grad-clip",
    "world_size": "--world-size",
}


def check_inference(question: Question, is_inference: bool, new_tokens: int | None, others: Mapping[str, Any]) -> None:
    """Raise `InputError` for options that exclude each other. `others` are further options that are for training."""
    if not is_inference:
        if new_tokens is not None:
            raise InputError("--new-tokens is for --inference, which is not given: give both, or neither")
        return
    given = [option for name, option in OF_TRAINING.items() if getattr(question, name) is not None]
    given += [option for option, value in others.items() if value is not None]
    if given:
        raise InputError(f"{given[0]} is about a training step: leave it out, or leave out --inference")


def inferred(question: Question, new_tokens: int | None) -> "GenerationRecord":
    """The estimate of the generation that a question is about."""
    from tightfit.cli.subject import subject_of
    from tightfit.models.generation_estimate import estimate_generation

    subject = subject_of(question, dry=True, inference=True)
    ids = _prompt(subject)[: question.batch_size or SIZE]
    asked = subject.asked
    with subject.rejections():
        return estimate_generation(
            subject.model,
            ids,
            new_tokens=NEW_TOKENS if new_tokens is None else new_tokens,
            precision=asked.step.precision,
            device=asked.step.device,
        )


def _prompt(subject: "Subject") -> "Tensor":
    """Token ids (B, T) that stand for a prompt."""
    from tightfit.step import TokenBatch

    batch = subject.batch.tensors() if isinstance(subject.batch, TokenBatch) else subject.batch
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    if ids is None:
        raise InputError(f"{subject.name} brings a batch without input_ids: --inference is for models of tokens")
    return ids
