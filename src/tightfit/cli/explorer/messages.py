"""The messages of a worker beside the parts of an answer, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NoPlan:
    """That no plan fits: why, the least that a plan reaches, and ways out as lines."""

    line: str
    least_bytes: int
    ways_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoAnswer:
    """That a question has no answer, or none from here on, in one line."""

    line: str


@dataclass(frozen=True)
class Progress:
    """One line about the progress of an answer: "2 of 4: looking for the fastest plan"."""

    line: str


@dataclass(frozen=True)
class Waited:
    """That the answer is still being computed, after so many whole seconds."""

    seconds: int
