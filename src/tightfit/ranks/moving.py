"""The copies of shards between host and card that FSDP2 makes under `CPUOffloadPolicy`, in a dry run of a card.

CPU tensors play those of the card, so a move of a tensor to the device that it is on already would do nothing. While
FSDP2 prepares a gather, a move to a device makes a copy in the card's memory. While it takes what was reduced, a move
makes one in the host's, and sums of gradients run there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.runtime.simulation import host_memory, simulation


class MovesOfShards(TorchFunctionMode):
    """A mode in which moves of plain tensors to a device are copies to the host, or to the card."""

    def __init__(self, *, to_host: bool):
        super().__init__()
        self.to_host = to_host

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            return simulation.link.moved(args[0], to_host=self.to_host)
        if func is torch.Tensor.__iadd__ and self.to_host:
            with host_memory():
                return func(*args, **kwargs)
        return func(*args, **kwargs)
