"""Handles the user's own gradient checkpointing, and refuses models in wrappers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import LeverError
from tightfit.ranks.processes.once import said_once
from tightfit.units import format_bytes

COMPILED = "compiled by torch.compile"
SWITCH = "gradient_checkpointing"  # the attribute of a layer or model that `transformers` asks


class TakenOver:
    """The library's own checkpointing, switched off while a plan is in force. `remove()` switches it on again."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = modules
        self._switch(False)

    def remove(self) -> None:
        self._switch(True)
        self._modules = ()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """A context in which the library's own checkpointing is on."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        for module in self._modules:
            setattr(module, SWITCH, on)


def what_is_taken_over(own_peak_bytes: int | None, planned_peak_bytes: int) -> str:
    """A line for the user: the plan replaces the checkpointing, and the peaks of both."""
    line = "gradient checkpointing is taken over: the memory plan decides what is recomputed"
    if own_peak_bytes is None:
        return line
    return f"{line}; its peak was {format_bytes(own_peak_bytes)}, the plan's is {format_bytes(planned_peak_bytes)}"


def take_over(model: nn.Module) -> TakenOver | None:
    """Switch off the checkpointing of `transformers`: the plan decides what is recomputed. None if it was off."""
    switched_on = [module for module in model.modules() if getattr(module, SWITCH, None) is True]
    return TakenOver(switched_on) if switched_on else None


def refuse_wrapped(model: Any, who: str) -> None:
    """Raise `LeverError` for a model that is sharded by FSDP1, in `DataParallel` or compiled, or in DDP inside of a
    part.
    """
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise said_once(
            LeverError(
                f"{who}: the model is {wrapper}: a plan is for one process, DDP or FSDP2 (fully_shard), and an "
                "uncompiled model; train without that, or without the budget"
            )
        )


def wrapper_of(model: Any) -> str | None:
    """The wrapper of a model in words; None if it has none."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_flattened(model):
        return f"wrapped in {type(model).__name__}"
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return COMPILED
    if getattr(model, "_compiler_ctx", None) is not None:  # a compiled LightningModule
        return COMPILED
    return None


def _is_flattened(model: Any) -> bool:
    """True if the first FSDP has joined parameters of the model to flat ones."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
