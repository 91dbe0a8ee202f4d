"""What the benchmarks of single levers share: sides that take turns, their options, and the JSON they write."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from environment import environment

WARM_UP = 1  # steps of each side that are not counted


def take_turns(sides: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side in each round. Sides take turns, in another order every round, so that whatever else the
    machine does falls on all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + WARM_UP):
        names = list(sides)[:: 1 if turn % 2 else -1]
        for name in names:
            taken = seconds_of(sides[name], device)
            if turn >= WARM_UP:
                seconds[name].append(taken)
    return seconds


def seconds_of(side: Callable[[], Any], device: str) -> float:
    """Wall-clock seconds until the device has finished."""
    settle(device)
    start = time.perf_counter()
    side()
    settle(device)
    return time.perf_counter() - start


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ratios(seconds: Mapping[str, Sequence[float]], plain: str) -> dict[str, dict[str, float]]:
    """Median seconds of each side, and the median of its ratios to the plain side, round by round."""
    return {
        name: {
            "seconds": statistics.median(own),
            "of_plain": statistics.median(a / b for a, b in zip(own, seconds[plain], strict=True)),
        }
        for name, own in seconds.items()
    }


def options_of(description: str, arguments: Sequence[str] | None, rounds: int) -> argparse.Namespace:
    """`--small`, `--device`, `--rounds`, `--output`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small enough for two CPU cores")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device: leave out --device cuda")
    if options.rounds < 1:
        parser.error("--rounds is at least 1")
    return options


def report(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Print the figures with the environment, and write them."""
    how = {"small": options.small, "device": options.device, "rounds": options.rounds}
    write({"environment": environment(), "options": how, **found}, options.output)


def write(figures: Mapping[str, Any], output: Path | None) -> None:
    """Print figures as JSON, and write them to a file if there is one."""
    text = json.dumps(figures, indent=1)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")
    print(text)
