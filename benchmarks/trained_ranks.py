"""A rank's peak in `tightfit train` with FSDP2 or DDP: predicted by the training itself, against real gloo processes.

Each process counts its allocations as in `ranks.py`, where the trainer measures its steps: what a step adds at its
highest to what model, optimizer and batch hold before it. The least of some steps is compared, for the reason that
`ranks.py` gives.

    python benchmarks/trained_ranks.py [--output results.json] [--ranks 2]
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from environment import environment
from ranks import Counts, built
from tightfit.memory.allocator import storage_bytes
from tightfit.training import loop
from tightfit.training.api import train
from tightfit.training.config import parse_config

STEPS, WARM = 8, 3
CASES: list[dict[str, Any]] = [
    {"parallel": "fsdp2"},
    {"parallel": "fsdp2", "precision": "bf16"},
    {"parallel": "fsdp2", "budget": "0.85x"},
    {"parallel": "ddp"},
]


def settings(case: dict[str, Any], folder: str) -> dict[str, Any]:
    text = "".join(f"The house of Rome has {number} doors and {number * 7} windows.\n" * 3 for number in range(300))
    Path(folder, "corpus.txt").write_text(text)
    shape = {"hidden_size": 90, "num_layers": 4, "num_heads": 5, "vocab_size": 300, "max_position_embeddings": 32}
    data = {"sequence_length": 32, "vocab_size": 300, "validation_fraction": 0.0}
    return {
        "model": shape,
        "data": {"source": f"{folder}/corpus.txt", **data},
        "training": {
            "max_steps": STEPS, "batch_size": 8, "device": "cpu", "parallel": case["parallel"],
            "precision": case.get("precision", "fp32"),
        },
        "memory": {"budget": case.get("budget")},
        "output": {"folder": f"{folder}/run"},
    }  # fmt: skip


def work(case: dict[str, Any], folder: str) -> None:
    """One real process: a training, and a line of JSON."""
    counts, peaks = Counts(), []

    def counted(step: Callable[[], Any], resident: Iterable[torch.Tensor]) -> int:
        held = storage_bytes(list(resident))
        gc.collect()
        gc.disable()
        time.sleep(0.1)  # gloo's threads let go of what they hold
        counts.reset()
        before = counts.live
        step()
        gc.enable()
        peaks.append(held + counts.peak - before)
        return peaks[-1]

    loop.measured_peak = counted
    loop.measured_steps = lambda max_steps, begun=0: frozenset(range(WARM, max_steps + 1))
    result = train(parse_config(settings(case, folder)))
    print(json.dumps({"peaks": peaks, "predicted": result.predicted_peak_bytes}), flush=True)


def compare(case: dict[str, Any], count: int, library: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        place = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(count):
            own = {name: str(value) for name, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()}
            words = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(case), folder]
            processes.append(subprocess.Popen(words, env=shared | own, stdout=subprocess.PIPE, text=True))
        written = [process.communicate(timeout=500)[0] for process in processes]
        assert not any(process.returncode for process in processes), "a process failed: its own message is above"
        plan = Path(folder, "run", "plan.json")
        of_ranks = json.loads(plan.read_text())["rank_peak_bytes"] if plan.exists() else []
    rows = [json.loads(text.splitlines()[-1]) for text in written]
    return {
        **case,
        "world_size": count,
        "predicted_bytes": rows[0]["predicted"],
        "rank_peak_bytes": of_ranks,
        "measured_bytes": [min(row["peaks"]) for row in rows],
        "highest_bytes": [max(row["peaks"]) for row in rows],
    }


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--worker"]:
        work(json.loads(arguments[1]), arguments[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", type=int, help="the number of one case")
    options = parser.parse_args(arguments)
    here, rows = environment(), []
    with tempfile.TemporaryDirectory() as folder:
        library = built(folder)
        for case in CASES if options.only is None else [CASES[options.only]]:
            rows.append(compare(case, options.ranks, library))
            print(json.dumps(rows[-1]), flush=True)
            if options.output is not None:
                options.output.write_text(json.dumps({"environment": here, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
