"""The operators that levers substitute: each has a reference, a low-memory version, and one public function."""

from tightfit.ops.attention import attention
from tightfit.ops.cross_entropy import linear_cross_entropy
from tightfit.ops.distillation import distillation_loss, hidden_state_loss
from tightfit.ops.gated import geglu, swiglu
from tightfit.ops.tiled import tiled

__all__ = [
    "attention",
    "distillation_loss",
    "geglu",
    "hidden_state_loss",
    "linear_cross_entropy",
    "swiglu",
    "tiled",
]
