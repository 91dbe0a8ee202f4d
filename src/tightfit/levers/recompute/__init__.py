"""Recompute: what autograd would hold from forward to backward is computed again instead, bit for bit the same."""

from tightfit.levers.recompute.lever import Applied, recompute, undo
from tightfit.levers.recompute.policy import KEEP_ALL, OFFLOAD_ALL, RECOMPUTE_ALL, Decision, OperatorKey, Policy

__all__ = [
    "KEEP_ALL",
    "OFFLOAD_ALL",
    "RECOMPUTE_ALL",
    "Applied",
    "Decision",
    "OperatorKey",
    "Policy",
    "recompute",
    "undo",
]
