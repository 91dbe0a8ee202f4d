"""The saving and the cost of a compression: a model before and after, predicted and measured."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tightfit.memory.allocator import measured_peak
from tightfit.models.compress.texts import row_length
from tightfit.models.generation import generate
from tightfit.models.generation_estimate import estimate_generation
from tightfit.models.loading import position_limit, vocabulary_size
from tightfit.models.saving import saved_bytes
from tightfit.models.scoring import score
from tightfit.optim.by_name import build_optimizer, state_tensors
from tightfit.planner.api import estimate
from tightfit.step import Part, StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.tracing.surroundings import plain_tensors

NEW_TOKENS = 8  # that the measured generation draws: their memory grows evenly from token to token
TIMED_RUNS = 3
ROOM = 0.7  # share of free memory up to which a step is measured, not only predicted


@dataclass(frozen=True)
class Side:
    """One side of a compression. Bytes are ints; None is what was not predicted or not measured.

    `inference_peak_bytes` is the peak of reading prompts and generating a few tokens, `step_peak_bytes` that of a
    training step with AdamW. `tokens_per_second` is the speed of one forward over the prompts, without a cache.
    """

    parameters: int | None = None
    disk_bytes: int | None = None
    inference_peak_bytes: int | None = None
    measured_inference_peak_bytes: int | None = None
    step_peak_bytes: int | None = None
    measured_step_peak_bytes: int | None = None
    tokens_per_second: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class CompressionReport:
    """A model before and after its compression by `method`; `notes` are sentences about it."""

    method: str
    before: Side
    after: Side
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self, path: str | Path) -> None:
        """Write the figures to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw the figures. Raises `InputError` if matplotlib is not installed."""
        from tightfit.planner.report.before_and_after import picture

        Path(path).write_bytes(picture(self.method, asdict(self.before), asdict(self.after)))

    def __str__(self) -> str:
        return describe_report(self)


def describe_report(report: CompressionReport, width: int = 100) -> str:
    """The report as a table for a terminal."""
    from tightfit.planner.report.before_and_after import table

    return table(report.method, asdict(report.before), asdict(report.after), report.notes, width=width)


def measured(
    model: nn.Module,
    *,
    text: Tensor | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    new_tokens: int = NEW_TOKENS,
    disk_bytes: int | None = None,
    inference: bool = True,
    step: bool = True,
) -> Side:
    """One side of a report: a model in memory, predicted by dry runs and measured by the allocator's record.

    `text` (rows, tokens) is held out, for the perplexity. `disk_bytes` None: what saving the model writes. A step is
    measured with a learning rate of zero, so it leaves the weights as they are, and only where it fits what is free.
    The model keeps its mode, and has no gradients afterwards.
    """
    length = row_length(model, seq_len)
    side: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "disk_bytes": saved_bytes(model) if disk_bytes is None else disk_bytes,
    }
    if inference:
        side |= _inference(model, batch_size, length, new_tokens)
    if step:
        side |= _step(model, batch_size, length)
    if text is not None:
        side["perplexity"] = perplexity(model, text)
    return Side(**side)


def perplexity(model: nn.Module, rows: Tensor) -> float:
    """exp of the mean negative log-likelihood of the rows' tokens, from the second one of each row on."""
    scores = [score(model, row[None], chunk_size=None) for row in rows]
    total = sum(one.log_likelihood for one in scores)
    return float(torch.tensor(-total / sum(one.tokens for one in scores), dtype=torch.float64).exp())


def _inference(model: nn.Module, batch_size: int, length: int, new_tokens: int) -> dict[str, Any]:
    limit = position_limit(model)
    if limit is not None:  # the prompt leaves positions for what is generated
        length = max(1, min(length, limit - new_tokens))
    device = next(model.parameters()).device
    ids = _ids(model, batch_size, length).to(device)
    predicted = estimate_generation(model, ids, new_tokens=new_tokens, device=device)
    resident = [*model.parameters(), *model.buffers(), *plain_tensors(model), ids]
    taken = measured_peak(lambda: generate(model, ids, max_new_tokens=new_tokens, temperature=0), resident)
    return {
        "inference_peak_bytes": predicted.peak_bytes,
        "measured_inference_peak_bytes": taken,
        "tokens_per_second": ids.numel() / statistics.median(_seconds(model, ids)),
    }


@torch.no_grad()
def _seconds(model: nn.Module, ids: Tensor) -> Sequence[float]:
    def once() -> float:
        began = time.perf_counter()
        model(input_ids=ids)
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return [once() for _ in range(TIMED_RUNS + 1)][1:]  # the first one makes what is made once


def _step(model: nn.Module, batch_size: int, length: int) -> dict[str, Any]:
    device = next(model.parameters()).device
    batch = TokenBatch(batch_size, length, _vocabulary(model))
    was_training = model.training
    model.train()
    try:
        predicted = estimate(model, batch, device=device).peak_bytes
        fits = device.type != "cpu" or predicted < ROOM * psutil.virtual_memory().available
        taken = step_peak(model, {k: v.to(device) for k, v in batch.tensors().items()}) if fits else None
    finally:
        model.train(was_training)
    return {"step_peak_bytes": predicted, "measured_step_peak_bytes": taken}


def step_peak(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The measured peak of a training step with AdamW, the second one, which has the optimizer's states. Its learning
    rate is zero: every weight is as it was before. Gradients are None afterwards.
    """
    optimizer = build_optimizer("adamw", model.parameters(), lr=0.0, weight_decay=0.0)

    def once() -> None:
        forward_backward(model, [Part(batch, 1.0)], model_loss)
        update(model, optimizer, StepSettings())

    once()
    states = state_tensors(optimizer)
    resident = [*model.parameters(), *model.buffers(), *plain_tensors(model), *states, *batch.values()]
    return measured_peak(once, resident)


def _vocabulary(model: nn.Module) -> int:
    return vocabulary_size(model) or 2


def _ids(model: nn.Module, batch_size: int, length: int) -> Tensor:
    return TokenBatch(batch_size, length, _vocabulary(model)).tensors()["input_ids"]
