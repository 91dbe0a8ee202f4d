"""Finds where in a training step an exception was raised."""

import traceback
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from tightfit.memory.frames import Frame, phase_of


class PlaceInStep(NamedTuple):
    """Phase and module path; None if the traceback does not show them."""

    phase: str | None
    module: str | None
    operator: str | None = None


def place_of_error(error: BaseException, paths: Mapping[int, str] | None = None) -> PlaceInStep:
    """Phase and innermost module on an exception's traceback.

    `paths` maps ids of modules to paths. Without it, paths start at the outermost module on the traceback.
    """
    calls = list(traceback.walk_tb(error.__traceback__))
    modules = [frame.f_locals.get("self") for frame, _ in calls]
    called = [module for module in modules if isinstance(module, nn.Module)]
    if paths is None:
        paths = {id(module): path for path, module in called[0].named_modules()} if called else {}
    phase = phase_of(Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in calls)
    if not called and phase == "forward":  # no module was running: the loop's own line
        phase = None
    known = [paths[id(module)] for module in called if id(module) in paths]
    return PlaceInStep(phase, known[-1] if known else None)
