"""A batch of whatever structure as the tuple that the planner takes, and the way back."""

from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.runtime.nested import Flattened, flatten


def flattened(batch: Any) -> Flattened:
    """What a batch holds. Raises `InputError` where no tensor is found."""
    flat = flatten(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in flat.leaves):
        raise InputError(
            f"MemoryBudget: a batch of class {type(batch).__name__} holds no tensors that can be seen: "
            "return a dict, list, tuple or dataclass"
        )
    return flat
