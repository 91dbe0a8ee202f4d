"""The operators that levers substitute: each has a reference, a low-memory version, and one public function."""

from tightfit.ops.attention import attention
from tightfit.ops.cross_entropy import linear_cross_entropy
from tightfit.ops.distillation import distillation_loss, hidden_state_loss
from tightfit.ops.gated import geglu, swiglu
from tightfit.ops.stored_distillation import stored_distillation_loss
from tightfit.ops.stored_tokens import sampled_tokens, top_k_tokens
from tightfit.ops.tiled import tiled

__all__ = [
    "attention",
    "distillation_loss",
    "geglu",
    "hidden_state_loss",
    "linear_cross_entropy",
    "sampled_tokens",
    "stored_distillation_loss",
    "swiglu",
    "tiled",
    "top_k_tokens",
]
