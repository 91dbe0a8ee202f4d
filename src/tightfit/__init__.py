"""tightfit: train transformer language models in the memory you have.

The public names are loaded when first used, so that `import tightfit` costs next to nothing and the command line
can show its help without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tightfit.version import VERSION

if TYPE_CHECKING:  # the names of `_HOMES`, for type checkers, which cannot follow `__getattr__`
    from tightfit.any_code.traced import Traced, trace
    from tightfit.compress.distilling import DistilResult, distil
    from tightfit.compress.pruning.pipeline import prune
    from tightfit.compress.quantising import quantise
    from tightfit.compress.report import CompressionReport
    from tightfit.doctor.diagnosing import diagnose
    from tightfit.doctor.diagnosis import Diagnosis
    from tightfit.levers.captured import capture, recompute
    from tightfit.levers.compiled import compile_blocks
    from tightfit.levers.offload import offload
    from tightfit.levers.recompute import undo
    from tightfit.levers.tile import tile
    from tightfit.memory.settings import set_allocator
    from tightfit.models.scoring import TextScore, score
    from tightfit.monitoring.cards.command import CardRun, card, run
    from tightfit.monitoring.watch import monitor
    from tightfit.multiple_choice.scoring import ChoiceScores, score_choices
    from tightfit.planner.api import curve, estimate, plan
    from tightfit.planner.curves import Curve
    from tightfit.planner.estimates import Estimate
    from tightfit.planner.plans import Plan
    from tightfit.planner.search.largest import Largest, maximise
    from tightfit.recipes.api import fit
    from tightfit.recipes.listed import Recipes
    from tightfit.step import TokenBatch
    from tightfit.tracing.build import build_dry
    from tightfit.training import TrainResult, train
    from tightfit.verification import Verification, verify

__version__ = VERSION

_HOMES: dict[str, str] = {
    "CardRun": "tightfit.monitoring.cards.command",
    "ChoiceScores": "tightfit.multiple_choice.scoring",
    "CompressionReport": "tightfit.compress.report",
    "Curve": "tightfit.planner.curves",
    "Diagnosis": "tightfit.doctor.diagnosis",
    "DistilResult": "tightfit.compress.distilling",
    "Estimate": "tightfit.planner.estimates",
    "Largest": "tightfit.planner.search.largest",
    "Plan": "tightfit.planner.plans",
    "Recipes": "tightfit.recipes.listed",
    "TextScore": "tightfit.models.scoring",
    "TokenBatch": "tightfit.step",
    "Traced": "tightfit.any_code.traced",
    "TrainResult": "tightfit.training",
    "Verification": "tightfit.verification",
    "build_dry": "tightfit.tracing.build",
    "capture": "tightfit.levers.captured",
    "card": "tightfit.monitoring.cards.command",
    "compile_blocks": "tightfit.levers.compiled",
    "curve": "tightfit.planner.api",
    "diagnose": "tightfit.doctor.diagnosing",
    "distil": "tightfit.compress.distilling",
    "estimate": "tightfit.planner.api",
    "fit": "tightfit.recipes.api",
    "maximise": "tightfit.planner.search.largest",
    "monitor": "tightfit.monitoring.watch",
    "offload": "tightfit.levers.offload",
    "plan": "tightfit.planner.api",
    "prune": "tightfit.compress.pruning.pipeline",
    "quantise": "tightfit.compress.quantising",
    "recompute": "tightfit.levers.captured",
    "run": "tightfit.monitoring.cards.command",
    "score": "tightfit.models.scoring",
    "score_choices": "tightfit.multiple_choice.scoring",
    "set_allocator": "tightfit.memory.settings",
    "tile": "tightfit.levers.tile",
    "trace": "tightfit.any_code.traced",
    "train": "tightfit.training",
    "undo": "tightfit.levers.recompute",
    "verify": "tightfit.verification",
}

__all__ = [
    "CardRun",
    "ChoiceScores",
    "CompressionReport",
    "Curve",
    "Diagnosis",
    "DistilResult",
    "Estimate",
    "Largest",
    "Plan",
    "Recipes",
    "TextScore",
    "TokenBatch",
    "Traced",
    "TrainResult",
    "Verification",
    "__version__",
    "build_dry",
    "capture",
    "card",
    "compile_blocks",
    "curve",
    "diagnose",
    "distil",
    "estimate",
    "fit",
    "maximise",
    "monitor",
    "offload",
    "plan",
    "prune",
    "quantise",
    "recompute",
    "run",
    "score",
    "score_choices",
    "set_allocator",
    "tile",
    "trace",
    "train",
    "undo",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tightfit' has no attribute {name!r}")
