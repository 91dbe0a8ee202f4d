"""MiniMind's own trainer scripts under a plan. Their step is found in their source: MiniMind has no trainer class."""

from tightfit.integrations.minimind.scripts import (
    MemoryFlags,
    MiniMindRun,
    check_unwrapped,
    run_minimind,
)

__all__ = ["MemoryFlags", "MiniMindRun", "check_unwrapped", "run_minimind"]
