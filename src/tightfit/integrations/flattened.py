"""Flattens a batch of any structure into the planner's tuple, and rebuilds it."""

from typing import Any

import torch

from tightfit.errors import InputError
from tightfit.runtime.nested import Flattened, flatten


def flattened(batch: Any) -> Flattened:
    """The leaves of a batch, and the function that rebuilds it. Raises `InputError` if it contains no tensor."""
    flat = flatten(batch)
    if not any(isinstance(leaf, torch.Tensor) for leaf in flat.leaves):
        raise InputError(
            f"MemoryBudget: no tensors were found in a batch of class {type(batch).__name__}: "
            "return a dict, list, tuple or dataclass"
        )
    return flat
