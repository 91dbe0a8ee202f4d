"""Training: from a configuration to a folder with the weights, the plan and what was measured."""

from tightfit.training.api import train
from tightfit.training.reporter import Reporter, SilentReporter, Start
from tightfit.training.result import StepMetrics, TrainResult

__all__ = ["Reporter", "SilentReporter", "Start", "StepMetrics", "TrainResult", "train"]
