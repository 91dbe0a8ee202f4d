"""MiniMind's own trainer scripts under torchrun, unmodified, with and without `tightfit minimind`, on a CPU.

    git clone https://github.com/jingyaogong/minimind
    python benchmarks/minimind_ranks.py --checkout minimind --output benchmarks/results/minimind_ranks.json

The scripts name NCCL and CUDA devices themselves where torchrun started them. In each process these names are answered
by gloo and the CPU before a script begins, so what its lines do is the same. What rank 0 prints of its steps, and what
it saves to resume from, is compared byte for byte; peaks are those of the second update, recorded operator by operator.
"""

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import ROOT, environment, git
from minimind import cases, copied, printed, saved, written

RANKS, STEPS = 2, 8
CASES = ("pretrain, dense", "dpo, dense")
PEAKS = re.compile(r"^peak +([\d.]+ \w+) +([\d.]+ \w+) +([\d.]+ \w+)$", re.MULTILINE)


def run(trainer: Path, script: str, arguments: list[str], flags: list[str]) -> subprocess.CompletedProcess[str]:
    """The script in `RANKS` processes, under tightfit if there are flags."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), __file__, "--as-rank"]
    return subprocess.run(
        [*words, script, *flags, *arguments], cwd=trainer, capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def as_rank(script: str, arguments: list[str]) -> None:
    """One process: gloo and the CPU answer for NCCL and CUDA."""
    import torch
    import torch.distributed as dist
    from torch import nn

    def on_cpu(place: Any) -> Any:
        return "cpu" if str(place).startswith("cuda") else place

    begin, move, move_module = dist.init_process_group, torch.Tensor.to, nn.Module.to
    engine, load = nn.parallel.DistributedDataParallel.__init__, torch.load

    def around(ddp: Any, model: nn.Module, device_ids: Any = None, **more: Any) -> None:
        engine(ddp, model, **more)

    found: Any = {
        (dist, "init_process_group"): lambda backend, **more: begin({"nccl": "gloo"}.get(backend, backend), **more),
        (torch.cuda, "set_device"): lambda device: None,
        (torch.Tensor, "to"): lambda tensor, *to, **more: move(tensor, *map(on_cpu, to), **more),
        (nn.Module, "to"): lambda module, *to, **more: move_module(module, *map(on_cpu, to), **more),
        (torch, "load"): lambda *a, map_location=None, **more: load(*a, map_location=on_cpu(map_location), **more),
        (nn.parallel.DistributedDataParallel, "__init__"): around,
    }
    for (place, name), answer in found.items():
        setattr(place, name, answer)
    if any(flag in arguments for flag in ("--memory_budget", "--use_checkpoint")):
        sys.argv = ["tightfit", "minimind", script, *arguments]
        runpy.run_module("tightfit", run_name="__main__")
    else:
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def compared(checkout: Path, name: str) -> dict[str, Any]:
    case = cases()[name]
    ends = []
    for flags in ([], ["--memory_budget", case.budget]):
        with copied(checkout) as trainer, tempfile.TemporaryDirectory() as folder:
            more = replace(case, batch_size=RANKS * case.batch_size)  # samples for all ranks
            data = written(more, STEPS, Path(folder) / "data.jsonl")
            ended = run(trainer, case.script, case.arguments(data), flags)
            if ended.returncode:
                raise SystemExit(f"{name} {flags}: {ended.stdout[-1000:] + ended.stderr[:30000]}")
            ends.append((printed(ended.stdout), saved(trainer), ended.stderr))
    (plain, plain_state, _), (planned, planned_state, said) = ends
    peaks = PEAKS.search(said)
    assert peaks is not None, said
    return {
        "case": name, "ranks": RANKS, "steps": STEPS, "budget": case.budget, "lines": len(plain),
        "same_lines": plain == planned, "same_states": plain_state == planned_state,
        "plain_predicted": peaks[1], "planned": peaks[2], "measured": peaks[3],
    }  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "minimind_ranks.json")
    parser.add_argument("--only", nargs="+", default=CASES)
    options = parser.parse_args()
    results = []
    for name in options.only:
        results.append(compared(options.checkout, name))
        print(results[-1], flush=True)
    checkout = git("rev-parse", "HEAD", folder=options.checkout) if (options.checkout / ".git").exists() else None
    record = {"environment": environment(), "checkout": checkout, "results": results}
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
