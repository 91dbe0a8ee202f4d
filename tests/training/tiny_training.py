"""Tiny trainings that several tests run."""

import json
from pathlib import Path
from typing import Any

from tightfit.training.api import train
from tightfit.training.config import Config, parse_config
from tightfit.training.reporter import SilentReporter, Start
from tightfit.training.result import StepMetrics, TrainResult

CORPUS = "".join(f"The {name} of {place} has {count} doors.\n" for count in range(60) for name, place in [
    ("house", "Rome"), ("mill", "Bath"), ("castle", "Kiel"), ("tower", "Lima"), ("barn", "Oslo"),
])  # fmt: skip


def settings(folder: Path, **sections: dict[str, Any]) -> Config:
    """A training of a decoder of some 30k parameters on a few hundred lines, in `folder`/run."""
    corpus = folder / "corpus.txt"
    corpus.write_text(CORPUS)
    defaults: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 32},
        "data": {"source": str(corpus), "sequence_length": 32, "vocab_size": 300, "validation_fraction": 0.1},
        "training": {"max_steps": 4, "batch_size": 8, "learning_rate": 1e-2, "device": "cpu"},
        "memory": {},
        "checkpoint": {},
        "output": {"folder": str(folder / "run")},
    }
    return parse_config({name: {**values, **sections.get(name, {})} for name, values in defaults.items()})


def run(folder: Path, **sections: dict[str, Any]) -> TrainResult:
    return train(settings(folder, **sections))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


class Listener(SilentReporter):
    """Remembers what it was told, by the name of the call."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def on_note(self, line: str) -> None:
        self.told.append(("note", line))

    def on_plan(self, plan: Any) -> None:
        self.told.append(("plan", plan))

    def on_start(self, start: Start) -> None:
        self.told.append(("start", start))

    def on_step(self, metrics: StepMetrics) -> None:
        self.told.append(("step", metrics.step))

    def on_peak(self, measured_peak_bytes: int) -> None:
        self.told.append(("peak", measured_peak_bytes))

    def on_end(self, result: TrainResult) -> None:
        self.told.append(("end", result))
