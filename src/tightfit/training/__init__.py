"""Training: from a configuration to a folder with the weights, the plan and what was measured."""

from tightfit.training.reporter import Reporter, SilentReporter, Start
from tightfit.training.result import StepMetrics, TrainResult
from tightfit.training.run import train

__all__ = ["Reporter", "SilentReporter", "Start", "StepMetrics", "TrainResult", "train"]
