"""What was predicted of code, as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tightfit.planner.records import StepFigures


@dataclass(frozen=True)
class CodeRecord:
    """The predicted memory and time of some code that runs once. Bytes are ints.

    `name` is that of the function, `modules` are the classes of the modules that it reaches, `parameters` counts
    theirs. `fits` says whether the code fits the device; on CUDA with reserved memory and the context.
    """

    name: str
    figures: StepFigures
    modules: tuple[str, ...]
    parameters: int
    device: str
    device_bytes: int
    context_bytes: int
    fits: bool
    assumptions: tuple[str, ...]

    def to_dict(self) -> Mapping[str, Any]:
        """Everything by name, the figures among the rest."""
        own = asdict(self)
        return {**{key: value for key, value in own.items() if key != "figures"}, **own["figures"]}
