"""Multiple-choice questions by log-likelihood, within a budget: `tightfit.score_choices`."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tightfit.errors import InputError, ModelError
from tightfit.memory.allocator import measured_peak
from tightfit.models.loading import position_limit
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.step import trace_inference
from tightfit.tracing.surroundings import plain_tensors
from tightfit.training.multiple_choice.batching import Batching, batched
from tightfit.training.multiple_choice.likelihood import ScoredRow, batch_of, log_likelihoods, reading, rows_of
from tightfit.training.multiple_choice.prompts import Codec, Prompt, ScoredChoice, is_lettered, requests_of
from tightfit.training.multiple_choice.questions import QuestionFile, read_subjects, subject_of
from tightfit.training.run_folders.loading import load_run
from tightfit.units import parse_budget

PROBE_TOKENS = 8  # of the shortest row: by which the head is found

Questions = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answered:
    """One question. `log_likelihoods` has the sum over each choice's tokens, in nats; `chosen` is the likeliest choice
    by that sum, `chosen_normalised` by the sum over the characters of the choice.
    """

    subject: str
    place: str
    answer: int
    chosen: int
    chosen_normalised: int
    log_likelihoods: tuple[float, ...]


@dataclass(frozen=True)
class Accuracy:
    """Shares of questions answered right, by the sum and by the normalised sum, with their standard errors.

    A standard error is that of a mean over a sample, sqrt(p (1 - p) / (n - 1)); None of a single question.
    """

    name: str
    questions: int
    accuracy: float
    standard_error: float | None
    accuracy_normalised: float
    standard_error_normalised: float | None


@dataclass(frozen=True)
class ChoiceScores:
    """The outcome of `score_choices`. Bytes are ints.

    `overall` counts every question once. `predicted_peak_bytes` is that of the heaviest batch, by a dry run;
    `measured_peak_bytes` is what the allocator recorded for that batch on a CPU, and for all batches on CUDA.
    `batch_size` is the number of rows of the largest batch. `cut` contexts were longer than the model's positions.
    """

    overall: Accuracy
    subjects: tuple[Accuracy, ...]
    predicted_peak_bytes: int
    measured_peak_bytes: int
    budget_bytes: int | None
    batch_size: int
    batches: int
    rows: int
    cut: int
    seconds: float
    answered: tuple[Answered, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: a log-likelihood that is not finite is None."""
        figures = asdict(self)
        for one in figures["answered"]:
            one["log_likelihoods"] = [score if math.isfinite(score) else None for score in one["log_likelihoods"]]
        return figures


def score_choices(
    model: nn.Module | str | Path,
    questions: Questions,
    *,
    tokenizer: Codec | None = None,
    prompt: Prompt = "auto",
    budget: int | str | None = None,
    batch_size: int | None = None,
) -> ChoiceScores:
    """Answer multiple-choice questions by the log-likelihood of each choice, as lm-evaluation-harness does.

    The evaluation has a memory of its own. Only logits that are needed are computed. The model stays on its device and
    in its mode.

    Args:
        model: The folder of a run, or a model with its `tokenizer`.
        questions: A file or a folder (JSON lines, or CSV as C-Eval or MMLU lay it out), or a list of mappings with
            `question`, `choices` and `answer` (an index, a letter or the text of a choice).
        tokenizer: An object whose `encode(text)` gives ids without special tokens, and whose `end_of_text` is one.
        prompt: `"text"` compares the likelihood of each choice's text after the question. `"letters"` lists the choices
            and compares their letters. `"auto"` takes letters for CSV.
        budget: The peak of the evaluation, in bytes or as text (`"2GiB"`, `"80%"`). Dry runs decide how many rows run
            at once.
        batch_size: The number of rows at once, instead of a budget.

    Returns:
        The accuracies, in all and by subject, with predicted and measured peaks in bytes.

    Raises:
        DataError: A question cannot be read.
        ModelError: The model is not causal, or too short.
        CannotFit: One row alone exceeds the budget.

    Example:
        >>> import tightfit
        >>> from tightfit.training.data.tokenizer import train_tokenizer
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=300))
        >>> asked = [{"question": "The sky is", "choices": ["blue", "a kind of cheese"], "answer": "blue"}]
        >>> found = tightfit.score_choices(model, asked, tokenizer=train_tokenizer(["the sky is blue"], 300))
        >>> found.overall.questions, found.predicted_peak_bytes == found.measured_peak_bytes
        (1, True)
    """
    if not isinstance(model, nn.Module):
        run = load_run(model)
        model, tokenizer = run.model, tokenizer or run.tokenizer
    if tokenizer is None:
        raise InputError("score_choices: a model without its tokenizer: give tokenizer=, or the folder of a run")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"score_choices: batch_size is {batch_size}: give at least 1")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__} is no causal model: a choice is scored as what follows its question")
    subjects = read_subjects(questions) if isinstance(questions, str | Path) else [subject_of(questions)]
    return _Evaluation(model, tokenizer).run(subjects, prompt, budget, batch_size)


class _Evaluation:
    """One model that reads rows. Holds no results."""

    def __init__(self, model: nn.Module, tokenizer: Codec):
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.role = cuda_role(self.device)

    def run(
        self, subjects: Sequence[QuestionFile], prompt: Prompt, budget: int | str | None, batch_size: int | None
    ) -> ChoiceScores:
        began = time.perf_counter()
        asked = [
            (subject, question, requests_of(question, self.tokenizer, lettered=is_lettered(subject, prompt)))
            for subject in subjects
            for question in subject.questions
        ]
        requests = [request for _, _, each in asked for request in each]
        rows, cut = rows_of(requests, position_limit(self.model))
        budget_bytes = None if budget is None else parse_budget(budget, device_bytes=device_bytes(self.device))
        with reading(self.model, torch.tensor([rows[-1].ids[:PROBE_TOKENS]]), self.role):
            batching = batched(rows, self.predict, budget_bytes=budget_bytes, batch_size=batch_size)
            sums, measured = self.answer(batching, len(requests))
        answered = []
        first = 0
        for subject, question, each in asked:
            scores = sums[first : first + len(each)]
            first += len(each)
            answered.append(_answered(subject.name, question.place, question.answer, scores, each))
        return ChoiceScores(
            overall=accuracy("overall", answered),
            subjects=tuple(accuracy(s.name, [a for a in answered if a.subject == s.name]) for s in subjects),
            predicted_peak_bytes=batching.predicted_peak_bytes,
            measured_peak_bytes=measured,
            budget_bytes=budget_bytes,
            batch_size=max(map(len, batching.batches)),
            batches=len(batching.batches),
            rows=len(rows),
            cut=cut,
            seconds=time.perf_counter() - began,
            answered=tuple(answered),
        )

    def predict(self, rows: Sequence[ScoredRow]) -> int:
        batch = batch_of(rows, self.tokenizer.end_of_text)
        return trace_inference(self.model, batch, log_likelihoods, role=self.role).peak_bytes

    def answer(self, batching: Batching, requests: int) -> tuple[list[float], int]:
        """The log-likelihood of each request, and the measured peak."""
        sums, measured = [0.0] * requests, 0
        for number, rows in enumerate(batching.batches):
            batch = batch_of(rows, self.tokenizer.end_of_text, self.device)
            found: list[Tensor] = []
            if number == batching.heaviest or self.device.type == "cuda":
                resident = [*self.model.parameters(), *self.model.buffers(), *plain_tensors(self.model)]
                run = _calling(self.model, batch, found)
                measured = max(measured, measured_peak(run, [*resident, *batch.values()]))
            else:
                found.append(log_likelihoods(self.model, batch))
            figures = found[0].double().tolist()
            first = 0
            for target in (target for row in rows for target in row.targets):
                sums[target.request] = math.fsum(figures[first : first + len(target.tokens)])
                first += len(target.tokens)
        return sums, measured


def _calling(model: nn.Module, batch: dict[str, Tensor], found: list[Tensor]) -> Any:
    return lambda: found.append(log_likelihoods(model, batch))


def _answered(
    subject: str, place: str, answer: int, scores: Sequence[float], requests: Sequence[ScoredChoice]
) -> Answered:
    each = [score / request.characters for score, request in zip(scores, requests, strict=True)]
    return Answered(subject, place, answer, _largest(scores), _largest(each), tuple(scores))


def _largest(scores: Sequence[float]) -> int:
    """The first of the highest; a score that is not a number is never chosen before one that is."""
    return max(range(len(scores)), key=lambda index: -math.inf if math.isnan(scores[index]) else scores[index])


def accuracy(name: str, answered: Sequence[Answered]) -> Accuracy:
    """Right answers among these."""
    count = len(answered)
    plain = sum(one.chosen == one.answer for one in answered) / count
    normalised = sum(one.chosen_normalised == one.answer for one in answered) / count
    return Accuracy(name, count, plain, standard_error(plain, count), normalised, standard_error(normalised, count))


def standard_error(share: float, count: int) -> float | None:
    """Of a share over a sample: the sample's deviation over sqrt(n)."""
    return None if count < 2 else math.sqrt(share * (1 - share) / (count - 1))


def device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def cuda_role(device: torch.device) -> CudaRole | None:
    """The device that dry runs simulate; None for a CPU."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    return CudaRole((card.major, card.minor), card.multi_processor_count)
