"""An 8B whose weights stream to cards that cannot hold them, on null cards: predicted and allocated bytes.

Adapters on each kind of base, and all weights, planned for a share of each card and run there for a few steps. No
kernel runs and no large copy is made, and the host's memory is not touched: not what streams, nor what the optimizer
would update. So a machine of 16 GB measures a training that takes 100 of the host's, and bytes on the card are all that
is measured.

    python -m benchmarks.streamed_on_cards --card PYTHON [--only NAME ...] [--output FILE]

`--card` is a Python whose PyTorch has CUDA. Rows are written one by one; one that the file has is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.environment import ROOT, environment
from benchmarks.gpu.measuring import decisions
from torch import nn

import tightfit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.stream import settle
from tightfit.levers.stream.tiers import PinnedTier
from tightfit.models.adapters import add_adapter
from tightfit.models.pretrained import build_pretrained
from tightfit.optim import OffloadedAdamW
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.levers import Stream
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tightfit.tracing.build import build_dry
from tightfit.training.config.schema import AdapterConfig, PretrainedModel

RESULTS = Path(__file__).parent / "results" / "streamed_on_cards.json"
MODEL, LENGTH, SHARE, STEPS = "llama-3.1-8b", 1024, "85%", 3
CARDS = {"rtx4060": 8, "rtx3060-12": 12, "rtx4080": 16, "rtx4090": 24}  # and the gigabytes that they are sold with
BASES = ("fp32", "bf16", "fp8", "int8", "nf4")
WORKS = (*(f"adapters on {base}" for base in BASES), "all weights in bf16", "all weights in fp32")


def build(work: str, *, dry: bool) -> nn.Module:
    """The model; its memory is not touched, but for the codes of a base in few bits, which are made."""
    held = work.rpartition(" ")[2]
    dtype = torch.float32 if held == "fp32" else torch.bfloat16

    def new() -> nn.Module:
        return build_pretrained(PretrainedModel(path=MODEL, random_init=True), dtype)

    def adapted(model: nn.Module) -> nn.Module:
        return add_adapter(model, AdapterConfig(r=16, alpha=32.0, base=held)) if work.startswith("adapters") else model

    if dry:
        return build_dry(lambda: adapted(new()))
    with torch.device("meta"):
        empty = new()
    model = empty.to_empty(device="cpu")
    model.tie_weights()  # pyright: ignore - of transformers
    return adapted(model)


def run(card: str, work: str) -> dict[str, Any]:
    """Plan the step for the card, and take it there: predicted and measured bytes."""
    began = time.perf_counter()
    twin = build(work, dry=True)
    optimizer = "adamw" if work.startswith("adapters") else "offloaded_adamw_fused"
    shape = tightfit.TokenBatch(1, LENGTH, twin.get_input_embeddings().num_embeddings)  # pyright: ignore
    levers = ["exact", "chunked_loss", "stream"]
    plan = tightfit.plan(twin, shape, SHARE, optimizer=optimizer, precision="bf16", levers=levers, device=card)
    planned, model, device = time.perf_counter() - began, build(work, dry=False), torch.device("cuda")
    batch = {name: tensor.to(device) for name, tensor in shape.tensors().items()}
    PinnedTier.keep = _untouched  # from here on: the plan has counted what both take
    OffloadedAdamW._step_on_host = lambda *_: None
    with plan.apply(model), decisions():
        settle(model, device)
        model = model.to(device) if plan.lever(Stream) is None else model
        steps = build_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
        for _ in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            forward_backward(model, _parts(batch, plan.micro_batches), model_loss, "bf16")
            update(model, steps, StepSettings("bf16"))
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        streamed = plan.lever(Stream)
        row = {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.peak_bytes,
            "measured_peak_bytes": peak,
            "predicted_reserved_bytes": plan.planned.reserved_bytes,
            "measured_reserved_bytes": reserved,
            "host_peak_bytes": plan.host_peak_bytes,
            "streamed_blocks": 0 if streamed is None else len(streamed.paths),
            "step_seconds": plan.step_seconds,
            "planning_seconds": planned,
        }
        print(json.dumps(row), flush=True)
        os._exit(0)  # within the levers: a card that has no room for the weights needs not take them back


def _parts(batch: Mapping[str, torch.Tensor], count: int) -> Any:
    return as_parts(split_batch(dict(batch), count), model_loss)


def _untouched(tier: Any, content: torch.UntypedStorage) -> Any:
    """A buffer for a storage, without its content."""
    tier._store.budget_bytes = sys.maxsize
    return tier._store.allocate(content.nbytes())


def in_own_process(python: str, card: str, work: str) -> dict[str, Any]:
    here = [python, "-m", "benchmarks.streamed_on_cards", "--case", json.dumps([card, work])]
    command = [python, "-m", "tightfit.devices.nullcard", card, "--no-copies", "--", *here]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode or not done.stdout.strip():
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", metavar="PYTHON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cards, or works")
    parser.add_argument("--case", metavar="JSON", help="one case in this process")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(run(*json.loads(given.case))))
        return
    assert given.card is not None, "--card names a Python with CUDA"
    rows = json.loads(given.output.read_text("utf-8"))["rows"] if given.output.exists() else []
    known = {(row["card"], row["work"]) for row in rows if "error" not in row}
    for card, gigabytes in CARDS.items():
        for work in WORKS:
            if (card, work) in known or (given.only and not {card, work} & set(given.only)):
                continue
            found = in_own_process(given.card, card, work)
            rows = [row for row in rows if (row["card"], row["work"]) != (card, work)]
            case = {"card": card, "gigabytes": gigabytes, "work": work, "commit": environment()["commit"]}
            rows.append(case | found)
            given.output.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", "utf-8")
            print(card, work, found, flush=True)


if __name__ == "__main__":
    main()
