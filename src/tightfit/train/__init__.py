"""Training: from a configuration to a folder with the weights, the plan and what was measured.

The package can be called: `tightfit.train(...)` is this package as soon as any part of it is imported, since Python
makes a subpackage an attribute of its parent, and the public function of that name before.
"""

import sys
from types import ModuleType
from typing import Any

from tightfit.train.reporter import Reporter, SilentReporter, Start
from tightfit.train.result import StepMetrics, TrainResult
from tightfit.train.run import train

__all__ = ["Reporter", "SilentReporter", "Start", "StepMetrics", "TrainResult", "train"]


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> TrainResult:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
