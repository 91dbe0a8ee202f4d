"""The objective of a causal language model: to predict each next token of its samples.

The loss is a sum over tokens, divided by the number of valid tokens of the whole effective batch, which is counted
before its first micro-batch runs. So the gradients of micro-batches add up to the gradient of the whole batch however
ragged their valid tokens are, and a micro-batch without any adds exactly zero.

What a mixture of experts adds to the loss (balance, z-loss) concerns all tokens of a micro-batch together, so it is not
a sum over tokens: each micro-batch's counts by its share of the valid tokens, and each is balanced by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tightfit.levers.deferred_logits import divided
from tightfit.levers.micro_batch import IGNORE_INDEX, valid_tokens
from tightfit.training.data.samples import ADVANTAGES, DRAWN, REFERENCE

# Of the whole effective batch, in each of its micro-batches.
VALID_TOKENS, WHOLE_ROWS = "valid_tokens", "whole_rows"
_NOT_FOR_THE_MODEL = frozenset({"labels", VALID_TOKENS, WHOLE_ROWS, REFERENCE, DRAWN, ADVANTAGES})


class Objective(Protocol):
    """The loss that a training minimises: a share of the mean over an effective batch, from each of its
    micro-batches.
    """

    is_cross_entropy: ClassVar[bool]  # of next tokens: its exponential is the perplexity

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor: ...

    def count(self, batch: Mapping[str, Any]) -> int:
        """The divisor of the mean over a batch from `counted`: tokens, pairs."""
        ...


@dataclass(frozen=True)
class CausalLMLoss:
    """`loss(model, batch)`: the batch's share of the mean cross-entropy of next tokens, a scalar.

    `batch` is a mapping with `input_ids` and `labels`, int64 (B, T), labels equal to the ids (the shift is made here)
    with -100 where nothing is to be learnt, and `valid_tokens`, an int that `counted` puts there; without it the
    batch's own valid tokens are counted. All else in it goes to the model, which returns an object with `logits`
    (B, T, V), and perhaps an `auxiliary_loss`, a scalar that is added to the mean. Without a valid token the loss is
    zero, not NaN.

    With `in_fp32`, logits in 16 bits are converted first. Autocast does that by itself.
    """

    in_fp32: bool = False
    is_cross_entropy: ClassVar[bool] = True
    reduction: ClassVar[str] = "sum"  # of micro-batches: their losses add up as they are

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        divisor = batch[VALID_TOKENS] if VALID_TOKENS in batch else valid_tokens(batch)
        output = model(**model_inputs(batch))
        logits, auxiliary = output.logits, getattr(output, "auxiliary_loss", None)
        del output  # else the logits would live as long as this frame
        if self.in_fp32:
            logits = logits.float()
        targets = next_tokens(batch["labels"])
        total = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if auxiliary is not None:
            total = total + auxiliary * (targets != IGNORE_INDEX).sum()
        return total / (divisor or 1)

    def count(self, batch: Mapping[str, Any]) -> int:
        """The valid tokens of the effective batch."""
        return batch[VALID_TOKENS]


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a batch that go to the model."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}


class TokenLogProbs(NamedTuple):
    """The log-probability of each label under the tokens before it, (B, T) fp32: zero where a label is ignored.

    `auxiliary` is what a mixture of experts adds to the mean loss in training, a scalar; None where it adds nothing.
    """

    of_tokens: Tensor
    auxiliary: Tensor | None


def token_log_probs(model: nn.Module, batch: Mapping[str, Any], temperature: float = 1.0) -> TokenLogProbs:
    """Those of a batch under a model, in the mode that the model is in; of the softmax of logits / temperature."""
    output = model(**model_inputs(batch))
    logits, auxiliary = divided(output.logits, temperature), getattr(output, "auxiliary_loss", None)
    del output  # else the logits would live as long as this frame
    # A cross-entropy, so that a head that defers its logits computes it in chunks.
    of_tokens = F.cross_entropy(
        logits.view(-1, logits.shape[-1]),
        next_tokens(batch["labels"]),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    if of_tokens.dtype.itemsize < torch.float32.itemsize:
        of_tokens = of_tokens.float()  # sums over many tokens follow
    return TokenLogProbs(-of_tokens.view(batch["labels"].shape), auxiliary)


def next_tokens(labels: Tensor) -> Tensor:
    """The target of each position, (B, T) to (B * T,); the last position of a row has none.

    The labels are shifted and padded, not the logits: slicing those would copy the largest tensor of the step.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()


def counted(batch: Mapping[str, Any], device: torch.device | str = "cpu") -> dict[str, Any]:
    """The batch on a device, with the numbers of its valid tokens and rows beside its tensors."""
    return {**on_device(batch, device), VALID_TOKENS: valid_tokens(batch), WHOLE_ROWS: len(batch["input_ids"])}


def on_device(batch: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """The batch with its tensors on a device."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
