"""Captured blocks: a block's forward and backward, recorded once and run as two straight programs."""

from tightfit.levers.captured.lever import CapturedForward, capture, capture_paths
from tightfit.levers.captured.on_cards import recompute

__all__ = ["CapturedForward", "capture", "capture_paths", "recompute"]
