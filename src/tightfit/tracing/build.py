"""Builds models dry: their parameters have shapes but no memory, so you can query models larger than this machine."""

from collections.abc import Callable

from torch import nn

from tightfit.tracing.cuda.flash_package import flash_models_allowed
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.faults import faults
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.reading import reads_answered
from tightfit.tracing.restore import generators_restored


def build_dry(factory: Callable[[], nn.Module]) -> nn.Module:
    """Build a module with tensors without memory, for `estimate` and `plan`. It cannot be trained.

    Args:
        factory: A function without arguments that returns the module.

    Returns:
        The module. Small tensors of it are real.

    Example:
        >>> import tightfit, torch
        >>> model = tightfit.build_dry(lambda: torch.nn.Linear(2**15, 2**15))  # 4 GiB that are never written
        >>> found = tightfit.estimate(model, (torch.ones(1, 2**15),), loss=lambda model, batch: model(*batch).sum())
        >>> found.peak_bytes > 2**32
        True
    """
    ledger = Ledger()
    dry = DryRun(ledger, ModuleTracker(nn.Module()))
    # Small tensors are drawn for real.
    with generators_restored(), flash_models_allowed(), dry, faults.raised(), reads_answered(dry):
        model = factory()
    ledger.close()
    return model
