"""Direct preference optimisation: to prefer one answer over another by more than a reference model does.

Rows of a batch alternate: the chosen answer of a pair, then its rejected one. The reference's log-probabilities are
computed once, by the model as it is before the first step, so no second model is in memory while the steps run.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.levers.chunked_loss import chunks_without_gradients
from tightfit.models.mode import evaluating
from tightfit.step import Precision, autocast
from tightfit.training.data.samples import Samples, SamplesWith
from tightfit.training.objective import REFERENCE, WHOLE_ROWS, token_log_probs

ROWS = 2  # of a pair


@dataclass(frozen=True)
class PreferenceLoss:
    """`loss(model, batch)`: the batch's share of the mean DPO loss over preference pairs, a scalar.

    With the log-probabilities p of answers under the model and r under the reference, the loss of a pair is
    -log sigmoid(beta * ((p_chosen - r_chosen) - (p_rejected - r_rejected))): Rafailov et al. 2023, "Direct Preference
    Optimization", equation 7.

    `batch` is a mapping with `input_ids` and `labels`, int64 (B, T), B even; labels are -100 where a token is not part
    of the answer. `reference_log_probs` (B,) fp32 are r. `whole_rows`, an int, is B of the effective batch, which
    `counted` adds. All other entries go to the model, which returns an object with `logits` (B, T, V), and perhaps an
    `auxiliary_loss`, a scalar that is added to the mean: each micro-batch's by its share of the pairs.
    """

    beta: float

    is_cross_entropy: ClassVar[bool] = False
    reduction: ClassVar[str] = "sum"  # of micro-batches: their losses add up as they are
    rows_together: ClassVar[int] = ROWS

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        found, auxiliary = answer_log_probs(model, batch)
        gain = found - batch[REFERENCE]
        margins = gain[0::ROWS] - gain[1::ROWS]
        total = -F.logsigmoid(self.beta * margins).sum()
        if auxiliary is not None:
            total = total + auxiliary * len(margins)
        return total / self.count(batch)

    def count(self, batch: Mapping[str, Any]) -> int:
        """The pairs of the effective batch."""
        return batch[WHOLE_ROWS] // ROWS


class AnswerLogProbs(NamedTuple):
    """The log-probability of each row's labelled tokens, (B,) fp32: a sum over the labels that are not ignored.

    `auxiliary` is what a mixture of experts adds to the mean loss in training, a scalar; None where it adds nothing.
    """

    of_rows: Tensor
    auxiliary: Tensor | None


def answer_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> AnswerLogProbs:
    """Those of a batch under a model, in the mode that the model is in."""
    of_tokens, auxiliary = token_log_probs(model, batch)
    return AnswerLogProbs(of_tokens.sum(dim=-1), auxiliary)


@torch.no_grad()
def reference_log_probs(
    model: nn.Module,
    samples: Samples,
    *,
    micro_batch_size: int,
    precision: Precision = "fp32",
    stop: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """The log-probabilities of all answers under the model as it is now, (rows of all samples,) fp32.

    The model runs in evaluation mode on `micro_batch_size` rows at a time. Under the levers of a training, that needs
    no more memory than a training step. None where `stop`, which is asked before
    each micro-batch, says so.
    """
    device = next(model.parameters()).device
    at_once = max(micro_batch_size // ROWS, 1)
    found: list[Tensor] = []
    with evaluating(model), chunks_without_gradients(model):
        for first in range(0, len(samples), at_once):
            if stop():
                return None
            batch = samples.batch(range(first, min(first + at_once, len(samples))))
            with autocast(precision, device.type):
                found.append(answer_log_probs(model, {k: v.to(device) for k, v in batch.items()}).of_rows.cpu())
    return torch.cat(found).numpy() if found else np.zeros(0, np.float32)


@dataclass(frozen=True)
class ReferencedSamples(SamplesWith):
    """Preference pairs with the reference's log-probabilities, (2 * pairs,) fp32, in each batch."""

    values: np.ndarray

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        rows = (np.asarray(samples)[:, None] * ROWS + np.arange(ROWS)).ravel()
        return {**self.samples.batch(samples), REFERENCE: torch.from_numpy(self.values[rows])}

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        return {**self.samples.fullest(size, length), REFERENCE: torch.zeros(size)}


def unreferenced(samples: Samples) -> "ReferencedSamples":
    """Pairs with zeros in the place of the reference's log-probabilities, to plan with before those are known."""
    return ReferencedSamples(samples, np.zeros(len(samples) * ROWS, np.float32))


def to_file(training: np.ndarray, validation: np.ndarray, data: str) -> bytes:
    """The reference's log-probabilities as a safetensors file; `data` is the fingerprint of the pairs."""
    digest = _digest(training, validation)
    return safetensors.numpy.save({"training": training, "validation": validation}, {"data": data, "digest": digest})


def from_file(path: Path, data: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The file that `to_file` made of these pairs; None where the file is missing, damaged, or of other pairs."""
    try:
        with safetensors.safe_open(str(path), "numpy") as file:
            stored = file.metadata() or {}
            training, validation = file.get_tensor("training"), file.get_tensor("validation")
    except (OSError, safetensors.SafetensorError):
        return None
    is_whole = stored.get("digest") == _digest(training, validation)
    return (training, validation) if is_whole and stored.get("data") == data else None


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
