"""The rest of a step's messages, sent by a rank that is out of memory in the middle of it.

The other ranks wait for these messages inside PyTorch. So the rank lets go of all that the step holds, and runs forward
and backward of a batch of few tokens in its place, in as many micro-batches. What the step has sent is not sent again
(`ranks.sent`). Whatever the others make of it is thrown away: they are told when they have their gradients.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tightfit.levers.micro_batch import batch_size, split_batch
from tightfit.training.stepper import without_labels

TOKENS = 16  # of each row: enough for any kernel, and next to no memory beside the weights


def small_parts(batch: Mapping[str, Any], count: int, together: int) -> list[Mapping[str, Any]]:
    """`count` micro-batches of one sample each (`together` rows), cut to few tokens, with nothing to learn."""
    sample = split_batch(dict(batch), batch_size(dict(batch)) // together)[0]
    length = sample["input_ids"].shape[1]
    cut = {name: value[:, :TOKENS] if _is_of_tokens(value, length) else value for name, value in sample.items()}
    return [without_labels(cut)] * count


def _is_of_tokens(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
