"""Recompute: backward recomputes activations, bit for bit, instead of autograd saving them."""

from tightfit.levers.recompute.expected import Expected, OtherOperators, Ran
from tightfit.levers.recompute.lever import Applied, recompute, undo
from tightfit.levers.recompute.policy import KEEP_ALL, OFFLOAD_ALL, RECOMPUTE_ALL, Decision, OperatorKey, Policy

__all__ = [
    "KEEP_ALL",
    "OFFLOAD_ALL",
    "RECOMPUTE_ALL",
    "Applied",
    "Decision",
    "Expected",
    "OperatorKey",
    "OtherOperators",
    "Policy",
    "Ran",
    "recompute",
    "undo",
]
