"""Fits how kernels use cards to one half of the published seconds, and writes `tightfit/devices/kernels.toml`.

    python -m benchmarks.published.fit_seconds [--remember FILE] [--rounds 16]

The parameters are those of `tightfit.devices.spec.Kernels`. Cards of one kind share them; the shares of the memory's
rate, and what no kind has rows enough for, are shared by all kinds but for one factor a kind. Every parameter begins at
a guess and is held there, weakly, by a penalty on the square of its logarithm: what no row determines stays there.
The search goes from parameter to parameter, multiplying and dividing by steps that shrink.

What is minimised is the mean over rows of e²/(e + 0.05), e the distance of predicted and published logarithms: near a
square where rows agree, near the distance itself where one is off. Rows of one case, card and mode weigh together as
the root of their number; a training step weighs twice an operator.
"""

import argparse
import json
import math
import pickle
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published import halves
from benchmarks.published.predicted_seconds import predicted, roofline_of
from benchmarks.published.work_done import work_done

from tightfit.devices.spec import Kernels
from tightfit.devices.work import Work

MEASURED = Path(__file__).parents[1] / "results" / "gpu_kernels.json"  # on an H200
OUTPUT = Path(__file__).parents[2] / "src" / "tightfit" / "devices" / "kernels.toml"
LONG_ROW_BYTES = 96 * 2**10  # between the rows of 64 and of 128 KiB, whose figures distinguish them

KINDS = {"a100-80": "ampere_a100", "a100-40": "ampere_a100", "h100": "hopper", "rtx3090": "tensor_cores",
         "rtx4090": "tensor_cores"}  # fmt: skip
NAMES = {"ampere_a100": "A100", "hopper": "H100", "tensor_cores": "RTX 3090 and RTX 4090"}
# Without rows. Assumed: no flash attention, fewer asynchronous copies; the rest as in consumer cards.
BEFORE_AMPERE = {"product/half": 0.7, "attention/forward": 0.3, "attention/backward": 0.2}

GUESSED_STREAMS = {
    **{f"elementwise/{lie}/{dtype}": 0.8 for lie in ("even", "uneven") for dtype in ("half", "float32", "mixed")},
    **{f"copy/{lie}/{dtype}": 0.8 for lie in ("even", "uneven") for dtype in ("half", "float32", "mixed")},
    **{f"{family}/{rows}": 0.8 for family in ("softmax", "softmax_backward") for rows in ("short", "long")},
    "norm": 0.8,
    "norm_backward": 0.45,
    "gather": 0.35,
    "scatter/read": 0.4,
    "scatter/write": 0.2,
    "reduction": 0.8,
    "random": 0.8,
    "product": 0.8,
    "scan": 0.8,
}
GUESSED_ALIKE = {
    "product/float32": 0.7,
    "product/tf32": 0.7,
    "product/unaligned": 0.5,
    "backward_of_attention": 0.86,  # of the forward's share: 63% and 73% at best (arXiv:2307.08691, section 4.1)
    "product_calls": 2.0,
    "tile_depth": 60.0,
    "ramp_depth": 250.0,
    "attention_ramp": 300.0,
    "exponential_width": 16.0,
    "pick_seconds": 25e-9,
    "scatter_seconds": 100e-6,
    "block_row_seconds": 0.5e-6,
}
GUESSED_OF_A_KIND = {
    "product/half": 0.75,
    "attention": 0.6,  # forward
    "memory": 1.0,
    "kernel_seconds": 3e-6,
    "launch_seconds": 20e-6,
}
HELD = 0.0005
# Rows of whole steps hardly distinguish the first four from one another and from the shares. The last two are rates of
# the memory: products that wait for it have no rows, and small ones would bend it; zeros are what a benchmark writes
# before each call, and the time of that would bend them.
HELD_FIRMLY = {
    "backward_of_attention": 0.1,
    "tile_depth": 0.004,
    "attention_ramp": 0.004,
    "exponential_width": 0.004,
    "product": 0.02,
    "copy/even/float32": 0.02,
}
HIGHEST_SHARE = 0.97  # above it a penalty: no kernel exceeds a rate that its maker publishes
FIRST_STEP, GROWN, SHRUNK = 0.25, 1.3, 0.5

Parameters = dict[str, float]


def guesses() -> Parameters:
    """Where the search begins."""
    of_kinds = {f"{kind}:{name}": value for kind in NAMES for name, value in GUESSED_OF_A_KIND.items()}
    return {**GUESSED_STREAMS, **GUESSED_ALIKE, **of_kinds}


def kernels(parameters: Parameters, kind: str) -> Kernels:
    """The kernels of a kind of card that these parameters describe."""
    own = {name: parameters[f"{kind}:{name}"] for name in GUESSED_OF_A_KIND}
    shares = {name: parameters[name] * own["memory"] for name in GUESSED_STREAMS}
    shares |= {name: parameters[name] for name in GUESSED_ALIKE if "/" in name}
    shares["product/half"] = own["product/half"]
    shares["attention/forward"] = own["attention"]
    shares["attention/backward"] = own["attention"] * parameters["backward_of_attention"]
    alike = {name: parameters[name] for name in GUESSED_ALIKE if "/" not in name and name != "backward_of_attention"}
    alike |= {name: own[name] for name in ("kernel_seconds", "launch_seconds")}
    return Kernels(shares=shares, long_row_bytes=LONG_ROW_BYTES, **alike)


class Fit:
    """A search over parameters; `rows` are those that it may see."""

    def __init__(self, rows: list[dict[str, Any]], work: dict[str, Counter[Work]], *, two_clocks: bool = False):
        self.rows, self.work, self.two_clocks = rows, work, two_clocks
        self.rooflines = {row["card"]: roofline_of(row) for row in rows}
        sets = Counter(map(_set_of, rows))
        self.weights = [(2 if row["kind"] == "step" else 1) / math.sqrt(sets[_set_of(row)]) for row in rows]

    def loss(self, parameters: Parameters) -> float:
        """What is minimised, the penalties included."""
        cards = {card: replace(r, kernels=kernels(parameters, KINDS[card])) for card, r in self.rooflines.items()}
        total = 0.0
        for row, weight in zip(self.rows, self.weights, strict=True):
            seconds = predicted(row, self.work[row["id"]], cards[row["card"]], two_clocks=self.two_clocks)
            error = abs(math.log(seconds / row["seconds"]))
            total += weight * error * error / (error + 0.05)
        return total / sum(self.weights) + self._penalty(parameters, cards)

    def _penalty(self, parameters: Parameters, cards: dict[str, Any]) -> float:
        held = sum(
            HELD_FIRMLY.get(name, HELD) * math.log(parameters[name] / guess) ** 2 for name, guess in guesses().items()
        )
        excess = sum(max(0.0, share - HIGHEST_SHARE) for r in cards.values() for share in r.kernels.shares.values())
        return held + 0.2 * excess

    def search(self, rounds: int) -> Parameters:
        """The parameters of the least loss that was found."""
        found = guesses()
        best, steps = self.loss(found), dict.fromkeys(found, FIRST_STEP)
        for number in range(rounds):
            for name in found:
                for way in (1, -1):
                    tried = {**found, name: found[name] * math.exp(way * steps[name])}
                    loss = self.loss(tried)
                    if loss < best:
                        found, best = tried, loss
                        steps[name] *= GROWN
                        break
                else:
                    steps[name] *= SHRUNK
            print(f"round {number + 1}: {best:.5f}", flush=True)
        return found


def _set_of(row: dict[str, Any]) -> tuple[str, ...]:
    return row["kind"], row["config"]["case"], row["card"], row["mode"]


def remembered_work(rows: list[dict[str, Any]], path: Path | None) -> dict[str, Counter[Work]]:
    """The work of all rows; kept in a file where one is named, since the dry runs take minutes."""
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())
    work = {row["id"]: work_done(row) for row in rows}
    if path is not None:
        path.write_bytes(pickle.dumps(work))
    return work


def as_toml(parameters: Parameters, rows: list[dict[str, Any]]) -> str:
    """The tables of all kinds, as they are committed."""
    lines = [
        "# What kernels make of the rates of a card; read by tightfit/devices/known.py. Written by",
        "# `python -m benchmarks.published.fit_seconds`: edit that, not this.",
        f"# Fitted by benchmarks/published/fit_seconds.py on commit {_commit()}, to {len(rows)} published rows:",
        "# the half of benchmarks/published/seconds.json that `is_for_fitting` chooses. Errors: docs/accuracy.md.",
        "# The fields are those of tightfit.devices.spec.Kernels.",
    ]
    for kind, cards in NAMES.items():
        count = sum(KINDS[row["card"]] == kind for row in rows)
        found, source = kernels(parameters, kind), f"fitted to {count} published rows of the {cards}"
        if kind == "hopper":
            found = replace(found, shares={**found.shares, "product/unaligned": unaligned_on_hopper()})
            source += "; unaligned products measured on an H200"
        lines += _table(kind, found, source)
    oldest = kernels(parameters, "tensor_cores")
    oldest = replace(oldest, shares={**oldest.shares, **BEFORE_AMPERE})
    assumed = "assumed: no published rows; as in consumer cards, but products and attention as an earlier generation's"
    return "\n".join([*lines, *_table("before_ampere", oldest, assumed)]) + "\n"


def unaligned_on_hopper() -> float:
    """The share of the rate of products whose rows begin anywhere: no published row has such on this kind of cards.

    Of the three products of a loss head with an odd vocabulary, beside the next multiple of eight.
    """
    odd, even = json.loads(MEASURED.read_text("utf-8"))["head"].values()
    return sum(even.values()) / sum(odd.values())


def _table(kind: str, found: Kernels, source: str) -> list[str]:
    numbers = {name: value for name, value in vars(found).items() if name != "shares"}
    return [
        "",
        f"[{kind}]",
        f"source = {json.dumps(source)}",
        *(f"{name} = {value:.4g}" for name, value in numbers.items()),
        "",
        f"[{kind}.shares]",
        *(f"{json.dumps(name)} = {value:.4g}" for name, value in found.shares.items()),
    ]


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--remember", type=Path, help="a file to keep the dry runs in")
    parser.add_argument("--rounds", type=int, default=16)
    given = parser.parse_args()
    work = remembered_work(halves.rows(), given.remember)
    seen = [row for row in halves.rows() if halves.is_for_fitting(row)]
    OUTPUT.write_text(as_toml(Fit(seen, work).search(given.rounds), seen), encoding="utf-8")
    print(f"written: {OUTPUT}")


if __name__ == "__main__":
    main()
