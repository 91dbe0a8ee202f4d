"""The step of a rank of FSDP2, predicted and planned by a process that is such a rank itself."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from tightfit.config.schema import Config
from tightfit.devices.spec import DeviceSpec
from tightfit.runtime.forked import in_a_fork
from tightfit.runtime.internals import forget_process_groups
from tightfit.step import Loss
from tightfit.training.fitting import Fit, fit
from tightfit.training.several import fit_as_json, fit_from_json


def fit_shards(
    model: nn.Module, batch: Mapping[str, Any], loss: Loss, config: Config, device: DeviceSpec, ranks: int
) -> Fit:
    """As `fit` does for so many ranks. Raises as `fit` does.

    A rank is played on a process group of its own, and there is a real one here: so it is played in a fork, and what
    PyTorch remembers of it (meshes that compare equal to real ones) ends with the fork.
    """

    def in_fork() -> bytes:
        forget_process_groups()
        return fit_as_json(fit(model, batch, loss, config, device, (), ranks), is_stored=False)

    return fit_from_json(in_a_fork(in_fork), config)[0]
