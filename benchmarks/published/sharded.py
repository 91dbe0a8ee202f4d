"""Predicts the memory that ranks of FSDP2 took on real cards, as others have published it, and compares.

    python -m benchmarks.published.sharded

The rows are in sharded.json: facts, each with its source, date and configuration. Rank 0 is played, with the model, the
loss and the wrapping of the commit that was measured (torchtitan.py). Published are bytes of the caching allocator,
after ten steps or more: the peak of allocated bytes, of reserved ones, or of those that the first step reserved, which
found no states of the optimizer. Writes benchmarks/results/published_sharded.json, of which
`benchmarks/accuracy_page.py` makes a table.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.published import torchtitan

from tightfit.devices.present import lookup
from tightfit.levers.micro_batch import as_parts, as_tensors, split_batch
from tightfit.planner.request import role_of
from tightfit.ranks.simulated import own_copy
from tightfit.step import StepSettings, TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.tracing.cuda.replay import play
from tightfit.tracing.step import trace_step
from tightfit.tracing.twin import twin_of

HERE = Path(__file__).resolve().parent
ROWS = HERE / "sharded.json"
RESULTS = HERE.parent / "results" / "published_sharded.json"
UNITS = {"GiB": 2**30, "% of 95.0396 GiB": 95.0396 * 2**30 / 100}


@dataclass(frozen=True)
class Step:
    """One rank's training step. `batch` and `length` are of one rank; `version` is one of torchtitan's."""

    version: str
    model: str
    card: str
    ranks: int
    batch: int
    length: int
    checkpoint: torchtitan.Checkpoint
    reshard: torchtitan.Reshard


@dataclass(frozen=True)
class Row:
    """One published figure, with `digits` behind its point."""

    source: str
    date: str
    step: Step
    quantity: str
    published: float
    unit: str
    digits: int
    ambiguous: str | None
    cause: str

    def predict(self) -> float:
        """The figure in the published unit, by our own code."""
        return predicted(self.step)[self.quantity] / UNITS[self.unit]


def rows(path: Path = ROWS) -> Iterator[Row]:
    """Every published row."""
    for given in json.loads(path.read_text("utf-8"))["rows"]:
        step = Step(**{name: given.pop(name) for name in Step.__dataclass_fields__})
        yield Row(**{"ambiguous": None, "cause": ""} | given, step=step)


@cache
def predicted(step: Step) -> dict[str, int]:
    """Bytes of each quantity."""
    version = torchtitan.VERSIONS[step.version]
    loss = torchtitan.Loss(version)
    twin = twin_of(build_dry(lambda: torchtitan.Model(step.model, version, step.checkpoint)))
    tokens = TokenBatch(step.batch, step.length, torchtitan.SHAPES[step.model].vocabulary)
    with torchtitan.allocator_setting(expandable=version.expandable):
        trace = trace_step(
            own_copy(twin), as_parts(split_batch(as_tensors(tokens), 1), loss), loss,
            optimizer=version.optimizer, settings=StepSettings(grad_clip=1.0), role=role_of(lookup(step.card)),
            rank=torchtitan.TitanRank(step.ranks, step.reshard, version),
        )  # fmt: skip
        assert trace.reserved_bytes is not None, "a card has an allocator that reserves"
        return {
            "allocated": trace.peak_bytes,
            "reserved": trace.reserved_bytes,
            "reserved by the first step": play(trace, steps=1).reserved_bytes,
        }


def described(row: Row) -> dict[str, Any]:
    return asdict(row)


def run() -> list[dict[str, Any]]:
    results = []
    for row in rows():
        figure = row.predict()
        results.append(described(row) | {"predicted": figure, "error": figure / row.published - 1})
        s = row.step
        print(
            f"{s.model}, {s.ranks} ranks, {s.batch} x {s.length}, {s.checkpoint}, {s.reshard}, {row.quantity}: "
            f"{row.published} {row.unit}, {figure:.{row.digits}f} predicted, {results[-1]['error']:+.2%}",
            flush=True,
        )
    return results


def main() -> None:
    record = {"environment": environment(), "results": run()}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
