"""What the host takes for an operator of a model on CUDA's path: in eager code, under recompute, in a captured block.

On a null card, which computes and copies nothing, all of a step's time is the host's. The shares of a launch in eager
PyTorch are those of `[host]` in devices/known.toml, with which cards are priced that are not present.

    python -m tightfit.devices.nullcard rtx4090 --no-copies -- python benchmarks/launches.py [--runs 5]
"""

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

from environment import environment
from taking_turns import write
from tightfit.devices.own_time import own_time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device: run it on a null card")
    runs = [asdict(own_time("cuda")) for _ in range(options.runs)]
    seconds = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    launch = seconds.pop("framework")
    shares = {name: round(each / launch, 2) for name, each in seconds.items()}
    write({"environment": environment(), "launch_seconds": launch, "launches": shares, "runs": runs}, options.output)


if __name__ == "__main__":
    main()
