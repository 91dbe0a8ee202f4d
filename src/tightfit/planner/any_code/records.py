"""Predictions for code, as plain data."""

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


@dataclass(frozen=True)
class GenerationRecord:
    """The predicted memory and time of a generation: a prompt is read, then texts grow token by token. Bytes are ints.

    `by_category` is made at the peak of weights, keys and values, activations (all that a forward holds for a while)
    and inputs. Prefill reads the prompt in pieces of `chunk_size` tokens and ends with the first new token; each
    further token is a decode step. `seconds_from` says where the seconds come from.
    """

    figures: StepFigures
    by_category: Mapping[str, int]
    prefill_peak_bytes: int
    decode_peak_bytes: int | None  # None for one new token, which prefill gives
    weights_bytes: int
    cache_bytes: int  # keys and values after the last token
    prefill_seconds: float
    first_token_seconds: float | None  # of the first decode step
    last_token_seconds: float | None
    decode_seconds: float
    tokens_per_second: float | None  # of all texts together, in the decode steps
    seconds_from: str
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    chunk_size: int
    parameters: int
    weights: str
    precision: str
    device: str
    device_bytes: int
    context_bytes: int
    fits: bool
    assumptions: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak; on CUDA, `torch.cuda.max_memory_allocated`."""
        return self.figures.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the whole generation."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def peak_phase(self) -> str:
        """Prefill or decode."""
        return "prefill" if self.prefill_peak_bytes == self.peak_bytes else "decode"

    def to_dict(self) -> Mapping[str, Any]:
        """Everything by name."""
        figures = self.figures
        own = {key: value for key, value in asdict(self).items() if key != "figures"}
        return {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": figures.reserved_bytes,
            "step_seconds": self.step_seconds,
            "peak_phase": self.peak_phase,
            "peak_module": figures.peak_module,
            "peak_operator": figures.peak_operator,
            **own,
            "timeline": dict(figures.timeline),
        }
