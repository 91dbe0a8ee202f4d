"""The lever by hand: `offload(model, "layers.*")`."""

from pathlib import Path

from torch import nn

from tightfit.errors import BudgetError, LeverError
from tightfit.levers.handle import Applied
from tightfit.levers.offload.store import DISK, HOST, SMALLEST_BYTES, HostStore, OffloadSettings
from tightfit.levers.recompute.lever import apply_policies, matching_modules
from tightfit.levers.recompute.policy import OFFLOAD_ALL, Decision, Policy
from tightfit.memory.pool import PoolStatistics
from tightfit.units import parse_bytes

INPUTS_ONLY = Policy(default=Decision.RECOMPUTE, offloads_inputs=True)


class AppliedOffload(Applied):
    """Offload in force on a model; `undo()` restores the model exactly."""

    def __init__(self, applied: Applied, offload_store: HostStore, tier: str):
        super().__init__([applied])
        self.offload_store, self.tier = offload_store, tier

    @property
    def statistics(self) -> PoolStatistics:
        """Hits, misses and bytes of the pool of buffers."""
        return self.offload_store.statistics(self.tier)


def offload(
    model: nn.Module,
    pattern: str,
    *,
    recompute: bool = False,
    folder: str | Path | None = None,
    budget: int | str | None = None,
    smallest: int | str = SMALLEST_BYTES,
) -> AppliedOffload:
    """Offload what every module whose path matches a glob would hold for backward: on a CPU to disk, on CUDA to pinned
    host memory, beside the computation.

    `pattern` is a glob over module paths, as for `recompute`. With `recompute=True` only what a module is given is
    offloaded and everything inside it is recomputed. `folder` is where the file lies that a CPU's values go to (it has
    no name, and is gone with the process); None: the system's folder for temporary files. `budget` bounds its size, or
    that of host memory, in bytes or as `"4GiB"`; None: half of what is free. Values for which there is no room stay in
    memory, with a warning (`OffloadFallback`). Storages below `smallest` stay in memory too. Parameters, buffers and
    the model's own inputs are never offloaded.

    Returns a handle with the pool's `statistics`, whose `undo()` restores the model exactly. Raises `LeverError` where
    nothing matches, a match has a lever already, the model lies on a device that has no tier to offload to, or the
    budget is more than what is free; `OutputError` where the folder cannot be used; `BudgetError` for a size that is
    none.

    Example:
        >>> import tightfit, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks)
        >>> with tightfit.offload(model, "*", smallest=1024) as handle:
        ...     model(torch.randn(64, 8)).sum().backward()
        >>> handle.statistics.high_water_bytes > 0
        True
    """
    paths = matching_modules(model, pattern)
    tier = tier_of(model)
    offload_store = HostStore(
        OffloadSettings(folder, positive_bytes(budget), positive_bytes(smallest) or SMALLEST_BYTES)
    )
    offload_store.open(tier)  # a folder or a budget that is wrong is an error now
    policy = INPUTS_ONLY if recompute else OFFLOAD_ALL
    return AppliedOffload(
        apply_policies(model, dict.fromkeys(paths, policy), offload_store=offload_store), offload_store, tier
    )


def positive_bytes(size: int | str | None) -> int | None:
    if size is None:
        return None
    count = parse_bytes(size)
    if count <= 0:
        raise BudgetError(f"offload: {size!r} is not above zero")
    return count


def tier_of(model: nn.Module) -> str:
    """Where a model's values go. Raises `LeverError` if a parameter lies where no tier reaches."""
    tier = DISK
    for name, parameter in model.named_parameters():
        if parameter.device.type == HOST:
            tier = HOST
        elif parameter.device.type not in (DISK, "meta"):
            raise LeverError(
                f"offload: {name} lies on {parameter.device}, from where nothing is offloaded: it is from cpu and cuda"
            )
    return tier
