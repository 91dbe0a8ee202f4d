"""The host's memory of really run trainings against its prediction: each training in a process of its own.

Measured is the highest resident memory once the training is planned (VmHWM, which Linux keeps). On a null card pinned
memory is real memory, and what stands for the card's own is taken off; there the highest of many samples counts.

    python benchmarks/host_memory.py [--card PYTHON] [--only NAME] [--output FILE]

`--card` is a Python whose PyTorch has CUDA: its rows run on a null card.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import tightfit
from environment import environment
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.counters import highest_rss, this_process
from tightfit.memory.disk import temporary_folder
from tightfit.memory.process import give_back_at_once
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.step import StepSettings, forward_backward, update

RESULTS = Path(__file__).parent / "results" / "host_memory.json"
WITHIN_BYTES, WITHIN_SHARE = 16 << 20, 0.01
STEPS = 3
_SMALL = {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "vocab_size": 2048}
_WIDE = {"hidden_size": 512, "num_layers": 3, "num_heads": 8, "vocab_size": 1024}
_DEEP = {"hidden_size": 192, "num_layers": 8, "num_heads": 6, "vocab_size": 4096}
_CPU: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, wide": {"model": _WIDE},
    "adamw, deep": {"model": _DEEP},
    "adamw, longer": {"length": 512, "batch": 4},
    "adamw, 16 rows": {"batch": 16},
    "adamw, 4 micro-batches": {"batch": 16, "micro_batches": 4},
    "adamw, bf16 weights": {"dtype": "bfloat16", "batch": 1},
    "adam": {"optimizer": "adam"},
    "sgd": {"optimizer": "sgd", "model": _WIDE},
    "muon": {"optimizer": "muon"},
    "adafactor": {"optimizer": "adafactor"},
    "adamw8bit": {"optimizer": "adamw8bit", "model": _WIDE},
    "flash_adamw": {"optimizer": "flash_adamw", "model": _WIDE},
    "offloaded_adamw": {"optimizer": "offloaded_adamw", "model": _WIDE},
    "clipped": {"grad_clip": 1.0},
    "recompute, 0.6x": {"budget": "0.6x"},
    "recompute, 0.7x, wide": {"budget": "0.7x", "model": _WIDE},
    "recompute, 0.5x, deep": {"budget": "0.5x", "model": _DEEP},
    "any lever, 0.4x": {"budget": "0.4x", "levers": "rounding"},
    "any lever, 0.3x, 16 rows": {"budget": "0.3x", "levers": "rounding", "batch": 16},
    "offload to a file": {"budget": "0.6x", "levers": ["offload"]},
}
_CARD: dict[str, dict[str, Any]] = {
    "adamw on a card": {"card": True, "model": _WIDE},
    "offloaded_adamw on a card": {"card": True, "model": _WIDE, "optimizer": "offloaded_adamw"},
    "offloaded_adamw:0.5 on a card": {"card": True, "model": _WIDE, "optimizer": "offloaded_adamw:0.5"},
    "offloaded_adamw on a card, bf16 weights": {
        "card": True,
        "model": _WIDE,
        "optimizer": "offloaded_adamw",
        "dtype": "bfloat16",
    },
    "offload on a card": {"card": True, "budget": "0.6x", "levers": ["offload"]},
    "offload and offloaded_adamw on a card": {
        "card": True,
        "budget": "0.7x",
        "levers": ["exact", "offload"],
        "optimizer": "offloaded_adamw",
    },
    "frozen blocks streamed to a card": {"card": True, "model": _WIDE, "frozen": "layers.", "streamed": "layers.*"},
    "frozen blocks streamed to a card from a file": {
        "card": True,
        "model": _WIDE,
        "frozen": "layers.",
        "streamed": "layers.*",
        "from_file": True,
    },
    "trained blocks streamed to a card": {
        "card": True,
        "model": _WIDE,
        "optimizer": "offloaded_adamw",
        "streamed": "layers.*",
        "trained": True,
    },
    "trained blocks streamed to a card from a file": {
        "card": True,
        "model": _WIDE,
        "optimizer": "offloaded_adamw_fused",
        "streamed": "layers.*",
        "trained": True,
        "from_file": True,
    },
}


def run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Predict a training, train a few steps, and return both figures in bytes."""
    card = case.get("card", False)
    give_back_at_once()
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**case.get("model", _SMALL), max_position_embeddings=1024))
    model.to(getattr(torch, case.get("dtype", "float32")))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.get("frozen", "-")))
    size, length, vocabulary = case.get("batch", 8), case.get("length", 256), model.embedding.num_embeddings
    ids = torch.randint(vocabulary, (size, length))
    batch, device = {"input_ids": ids, "labels": ids}, "cuda" if card else "cpu"
    precision, clip, count = case.get("precision", "fp32"), case.get("grad_clip"), case.get("micro_batches", 1)
    name = case.get("optimizer", "adamw")
    how: dict[str, Any] = {"optimizer": name, "precision": precision, "micro_batches": count, "grad_clip": clip}
    how["device"] = "rtx4090" if card else "cpu"
    budget = case.get("budget")
    found: Any
    if "streamed" in case:
        tier = str(temporary_folder()) if case.get("from_file") else None
        streamed: dict[str, Any] = {"pattern": case["streamed"], "trained": case.get("trained", False), "tier": tier}
        with tightfit.stream(model, **streamed):
            found = tightfit.estimate(model, batch, **how)
        levers = tightfit.stream(model, device=device, **streamed)
    elif budget is None:
        found, levers = tightfit.estimate(model, batch, **how), nullcontext()
    else:
        found = tightfit.plan(model, batch, budget, levers=case.get("levers"), **how)
        levers, count = found.apply(model), found.micro_batches
    gc.collect()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch).loss

    with levers, _watched(card) as watch:
        if "streamed" not in case:  # which has moved what stays there
            model.to(device)
        optimizer = build_optimizer(name, model.parameters())
        on_device = {key: value.to(device) for key, value in batch.items()}
        parts = as_parts(split_batch(on_device, count), loss)
        for _ in range(STEPS):
            forward_backward(model, parts, loss, precision)
            update(model, optimizer, StepSettings(precision, clip))
        measured = watch()
    return {
        "predicted_bytes": found.host_peak_bytes,
        "measured_bytes": measured,
        "by_category": dict(found.host_by_category),
    }


@contextmanager
def _watched(card: bool) -> Iterator[Callable[[], int]]:
    """Gives a function that returns the highest resident memory since the context began."""
    if not card:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        yield highest_rss
        return
    library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0]) if os.environ.get("LD_PRELOAD") else ctypes.CDLL(None)
    library.card_resident.restype = ctypes.c_size_t
    highest, ended = [0], threading.Event()

    def sample() -> None:
        highest[0] = max(highest[0], this_process().memory_info().rss - library.card_resident())

    def watch() -> None:
        while not ended.wait(0.002):
            sample()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def measured() -> int:
        sample()
        return highest[0]

    try:
        yield measured
    finally:
        ended.set()
        thread.join()


def is_within(row: Mapping[str, Any]) -> bool:
    """True if a prediction is within 1% of what was measured, or within 16 MiB."""
    measured = row["measured_bytes"]
    return abs(row["predicted_bytes"] - measured) <= max(WITHIN_BYTES, WITHIN_SHARE * measured)


def sentence(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The outcome in a sentence, for a page."""
    errors = [row["predicted_bytes"] - row["measured_bytes"] for row in rows.values()]
    cards = sum(name in _CARD for name in rows)
    least, most = (f"{error / 2**20:+.1f} MiB" for error in (min(errors), max(errors)))
    return (
        f"Of {len(rows)} small trainings that really ran ({cards} of them on a null card), "
        f"{sum(map(is_within, rows.values()))} took what was predicted of the host's memory within 16 MiB or 1% "
        f"(highest resident memory; predictions were off by {least} to {most})."
    )


def _in_own_process(case: Mapping[str, Any], python: str | None) -> dict[str, Any]:
    here = [str(Path(__file__)), "--case", json.dumps(case)]
    command = [sys.executable, *here]
    if case.get("card"):
        assert python is not None, "rows of cards need --card"
        command = [python, "-m", "tightfit.devices.nullcard", "rtx4090", "--", python, *here]
    surroundings = {**os.environ, "TIGHTFIT_NULLCARD_RESIDENT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", metavar="PYTHON")
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these rows; the others stay as they are in the file")
    parser.add_argument("--case", metavar="JSON", help="one case in this process")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(run(json.loads(given.case))))
        return
    cases = _CPU | (_CARD if given.card else {})
    rows = {} if given.only is None else json.loads(given.output.read_text("utf-8"))["results"]
    for name in given.only or cases:
        begun = time.perf_counter()
        row = rows[name] = _in_own_process(cases[name], given.card)
        difference = (row["predicted_bytes"] - row["measured_bytes"]) / 2**20
        print(f"{name:45} {row['measured_bytes'] / 2**20:8.1f} MiB, predicted {difference:+6.1f} MiB, "
              f"{time.perf_counter() - begun:.0f} s", flush=True)  # fmt: skip
        given.output.write_text(json.dumps({"environment": environment(), "results": rows}, indent=1) + "\n")
    print(sentence(rows))


if __name__ == "__main__":
    main()
