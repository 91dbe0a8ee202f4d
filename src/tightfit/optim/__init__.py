"""Memory-saving optimizers: states on the host or in 8 bits, 16-bit weights, steps in backward, Muon with AdamW."""

from tightfit.optim.bf16 import BF16AdamW
from tightfit.optim.flash import FlashAdamW
from tightfit.optim.in_backward import StepInBackward, step_in_backward
from tightfit.optim.muon import Muon8bit, MuonWithAdamW
from tightfit.optim.offloaded import OffloadedAdamW

__all__ = [
    "BF16AdamW",
    "FlashAdamW",
    "Muon8bit",
    "MuonWithAdamW",
    "OffloadedAdamW",
    "StepInBackward",
    "step_in_backward",
]
