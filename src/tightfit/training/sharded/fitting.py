"""The step of a rank of FSDP2, predicted and planned by a process that is such a rank itself."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.runtime.forked import in_a_fork
from tightfit.runtime.internals import forget_placements, forget_process_groups, process_groups_aside
from tightfit.step import Loss
from tightfit.training.config.schema import Config
from tightfit.training.fitting import Fit, fit
from tightfit.training.several import fit_as_json, fit_from_json


def fit_shards(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: DeviceSpec,
    ranks: int,
    apart: tuple[str, ...] | None = None,
) -> Fit:
    """As `fit` does for so many ranks. Raises as `fit` does.

    A rank is simulated on a process group of its own, and there is a real one here: so it runs in a fork, and what
    PyTorch remembers of it (meshes that compare equal to real ones) ends with the fork. A process with a card cannot be
    forked, neither CUDA nor autograd's threads: there, what PyTorch remembers of a simulated rank is cleared.
    """

    def planned() -> Fit:
        return fit(model, batch, loss, config, device, (), ranks, apart)

    def in_fork() -> bytes:
        forget_process_groups()
        return fit_as_json(planned(), is_stored=False)

    if not torch.accelerator.is_available():
        return fit_from_json(in_a_fork(in_fork), config)[0]
    forget_placements()
    try:
        with process_groups_aside():
            return planned()
    finally:
        forget_placements()
        gc.collect()  # FSDP2's simulated modules and hooks hold each other


def planner_of_shards(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss: Loss,
    config: Config,
    device: DeviceSpec,
    ranks: int,
    apart: tuple[str, ...] = (),
) -> Callable[[int], Fit]:
    """A function that returns the fastest plan of the ranks within so many bytes, in the middle of their training.

    `model` is the one before it was sharded, without memory, and `apart` is what was sharded beside its blocks. The
    function raises as `fit` does.
    """

    def within(budget_bytes: int) -> Fit:
        bounded = config.model_copy(update={"memory": config.memory.model_copy(update={"budget": budget_bytes})})
        return fit_shards(model, batch, loss, bounded, device, ranks, apart)

    return within
