"""What the monitor costs when it only samples: a training loop with it against the same loop without it.

Runs of steps with and without take turns, and change places from pair to pair; the figure is the median of the pairs'
ratios of median steps, so that whatever else the machine does falls on both. The hooks are on in the steps with, off in
those without; the first samples of each run are all taken, as only those of a training's first steps are.

    python benchmarks/monitor_overhead.py [--share 0.2] [--output results.json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tightfit
from environment import environment
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.step import TokenBatch, model_loss

TINY = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 600}
# Shape, sequences, tokens, pairs of runs: small, since the cost is one for each step whatever the step takes.
CASES = {"tiny": (TINY, 4, 64, 20), "cpu8": (PRESETS["cpu8"], 2, 64, 5)}
RUN = 20  # steps
WARM_UP = 3


def training_step(case: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer and one step of a usual loop."""
    torch.manual_seed(0)
    shape, size, length, _ = CASES[case]
    config = DecoderConfig(**shape)
    model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = TokenBatch(size, length, config.vocab_size).tensors()

    def step() -> None:
        model_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, optimizer, step


def median_step(step: Callable[[], None]) -> float:
    """Seconds of processor time, the median of a run: what other processes do in between is not in it."""
    taken = []
    for _ in range(RUN):
        start = time.process_time()
        step()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def watched(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> float:
    """The same under a monitor that samples."""
    with tightfit.monitor(model, optimizer, traced_step=None):
        return median_step(step)


def measure(case: str, share: float) -> dict[str, Any]:
    """Median and quartiles of the ratio of a watched step to a plain one."""
    model, optimizer, step = training_step(case)
    pairs = max(4, int(CASES[case][-1] * share))
    for _ in range(WARM_UP):
        step()
    ratios, plain = [], []
    for turn in range(pairs):
        if turn % 2:
            with_watch, without = watched(model, optimizer, step), median_step(step)
        else:
            without, with_watch = median_step(step), watched(model, optimizer, step)
        ratios.append(with_watch / without)
        plain.append(without)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "batch": CASES[case][1:3],
        "pairs": pairs,
        "steps_in_a_run": RUN,
        "plain_step_seconds": statistics.median(plain),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of pairs")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    results = {case: measure(case, options.share) for case in CASES}
    text = json.dumps({"environment": environment(), "cases": results}, indent=2)
    if options.output is not None:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
