"""tightfit: train transformer language models in the memory you have.

The public names are loaded when first used, so that `import tightfit` costs next to nothing and the command line
can show its help without torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES: dict[str, str] = {
    "Curve": "tightfit.planner.curves",
    "Diagnosis": "tightfit.doctor.diagnosis",
    "Estimate": "tightfit.planner.estimates",
    "Largest": "tightfit.planner.search.largest",
    "Plan": "tightfit.planner.plans",
    "TextScore": "tightfit.models.scoring",
    "TokenBatch": "tightfit.step",
    "TrainResult": "tightfit.training",
    "Verification": "tightfit.verification",
    "build_dry": "tightfit.tracing.build",
    "compile_blocks": "tightfit.levers.compiled",
    "curve": "tightfit.planner.api",
    "diagnose": "tightfit.doctor.diagnosing",
    "estimate": "tightfit.planner.api",
    "maximise": "tightfit.planner.search.largest",
    "monitor": "tightfit.monitoring.watch",
    "offload": "tightfit.levers.offload",
    "plan": "tightfit.planner.api",
    "recompute": "tightfit.levers.recompute",
    "score": "tightfit.models.scoring",
    "set_allocator": "tightfit.memory.settings",
    "tile": "tightfit.levers.tile",
    "train": "tightfit.training",
    "undo": "tightfit.levers.recompute",
    "verify": "tightfit.verification",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
