"""Memory-saving optimizers: states on the host, 16-bit weights, a step inside backward, Muon with AdamW."""

from tightfit.optim.bf16 import BF16AdamW
from tightfit.optim.in_backward import StepInBackward, step_in_backward
from tightfit.optim.muon import MuonWithAdamW
from tightfit.optim.offloaded import OffloadedAdamW

__all__ = ["BF16AdamW", "MuonWithAdamW", "OffloadedAdamW", "StepInBackward", "step_in_backward"]
