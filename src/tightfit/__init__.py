"""tightfit: train transformer language models in the memory you have.

The public names are loaded when first used, so that `import tightfit` costs next to nothing and the command line
can show its help without torch.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tightfit.errors import CannotFit as _CannotFit

if TYPE_CHECKING:  # the names of `_HOMES`, for type checkers, which cannot follow `__getattr__`
    from tightfit.levers.captured import capture, recompute
    from tightfit.levers.compiled import compile_blocks
    from tightfit.levers.offload import offload
    from tightfit.levers.recompute import undo
    from tightfit.levers.stream import stream
    from tightfit.levers.tile import tile
    from tightfit.memory.settings import set_allocator
    from tightfit.models.compress.distilling import DistilResult, distil
    from tightfit.models.compress.pruning.pipeline import prune
    from tightfit.models.compress.quantising import quantise
    from tightfit.models.compress.report import CompressionReport
    from tightfit.models.scoring import TextScore, score
    from tightfit.planner.any_code.traced import Traced, trace
    from tightfit.planner.api import curve, estimate, plan
    from tightfit.planner.curves import Curve
    from tightfit.planner.estimates import Estimate
    from tightfit.planner.plans import Plan
    from tightfit.planner.search.largest import Largest, maximise
    from tightfit.recipes.api import fit
    from tightfit.recipes.doctor.describe import Diagnosis
    from tightfit.recipes.doctor.diagnosing import diagnose
    from tightfit.recipes.table import Recipes
    from tightfit.step import Step, TokenBatch
    from tightfit.tracing.build import build_dry
    from tightfit.training.api import train
    from tightfit.training.monitoring.cards.command import CardRun, card, run
    from tightfit.training.monitoring.watch import monitor
    from tightfit.training.multiple_choice.scoring import ChoiceScores, score_choices
    from tightfit.training.result import TrainResult
    from tightfit.verification import Verification, verify

__version__: str

_HOMES: dict[str, str] = {
    "CardRun": "tightfit.training.monitoring.cards.command",
    "ChoiceScores": "tightfit.training.multiple_choice.scoring",
    "CompressionReport": "tightfit.models.compress.report",
    "Curve": "tightfit.planner.curves",
    "Diagnosis": "tightfit.recipes.doctor.describe",
    "DistilResult": "tightfit.models.compress.distilling",
    "Estimate": "tightfit.planner.estimates",
    "Largest": "tightfit.planner.search.largest",
    "Plan": "tightfit.planner.plans",
    "Recipes": "tightfit.recipes.table",
    "Step": "tightfit.step",
    "TextScore": "tightfit.models.scoring",
    "TokenBatch": "tightfit.step",
    "Traced": "tightfit.planner.any_code.traced",
    "TrainResult": "tightfit.training.result",
    "Verification": "tightfit.verification",
    "build_dry": "tightfit.tracing.build",
    "capture": "tightfit.levers.captured",
    "card": "tightfit.training.monitoring.cards.command",
    "compile_blocks": "tightfit.levers.compiled",
    "curve": "tightfit.planner.api",
    "diagnose": "tightfit.recipes.doctor.diagnosing",
    "distil": "tightfit.models.compress.distilling",
    "estimate": "tightfit.planner.api",
    "fit": "tightfit.recipes.api",
    "maximise": "tightfit.planner.search.largest",
    "monitor": "tightfit.training.monitoring.watch",
    "offload": "tightfit.levers.offload",
    "plan": "tightfit.planner.api",
    "prune": "tightfit.models.compress.pruning.pipeline",
    "quantise": "tightfit.models.compress.quantising",
    "recompute": "tightfit.levers.captured",
    "run": "tightfit.training.monitoring.cards.command",
    "score": "tightfit.models.scoring",
    "score_choices": "tightfit.training.multiple_choice.scoring",
    "set_allocator": "tightfit.memory.settings",
    "stream": "tightfit.levers.stream",
    "tile": "tightfit.levers.tile",
    "trace": "tightfit.planner.any_code.traced",
    "train": "tightfit.training.api",
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
    "Step",
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
    "stream",
    "tile",
    "trace",
    "train",
    "undo",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from tightfit.version import package_version

        return package_version()
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tightfit' has no attribute {name!r}")


def _ways_out_of(refusal: Any) -> Sequence[Any]:
    from tightfit.recipes.ways_out import ways_out_of  # most who catch the error do not ask

    return ways_out_of(refusal)


_CannotFit.find_ways_out = _ways_out_of
