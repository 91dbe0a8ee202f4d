"""The lever offload, applied by hand: `offload(model, "layers.*")`."""

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
    """Offload the saved activations of every module whose path matches a glob.

    On a CPU they move to a file on disk. On CUDA they move to pinned host memory, in parallel with the computation.
    Parameters, buffers and the model's own inputs are never offloaded.

    Args:
        model: The module whose blocks are offloaded.
        pattern: A glob over module paths, such as `"layers.*"`.
        recompute: Offload only the inputs of each module, and recompute everything inside it.
        folder: The folder of the file; None: the system's folder for temporary files. The file has no name, and the
            system frees it when the process ends.
        budget: The limit of the file or of host memory, in bytes or as `"4GiB"`; None: half of what is free. Values
            beyond it stay in memory, with a warning (`OffloadFallback`).
        smallest: Storages below this size stay in memory, in bytes or as text.

    Returns:
        A handle with the pool's `statistics`, whose `undo()` restores the model exactly.

    Raises:
        LeverError: Nothing matches, a match already has a lever, the model's device has nothing to offload to, or the
            budget exceeds the free memory.
        OutputError: The folder cannot be used.
        BudgetError: A size is invalid.

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
    offload_store.open(tier)  # so that a wrong folder or budget raises now, and not in the first forward
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
    """The tier to which a model's values are offloaded. Raises `LeverError` if a parameter's device has none."""
    tier = DISK
    for name, parameter in model.named_parameters():
        if parameter.device.type == HOST:
            tier = HOST
        elif parameter.device.type not in (DISK, "meta"):
            raise LeverError(
                f"offload: {name} is on {parameter.device}: offload works from cpu and cuda, so move the model there"
            )
    return tier
