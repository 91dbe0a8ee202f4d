"""How long an estimate and a plan take, and how much memory: models of 1B, 8B and 70B, each in a process of its own.

    python benchmarks/plan_time.py --output benchmarks/results/plan_time.json

The models are built dry and planned for a card that is not here (one with 4 TiB), in bf16 autocast. Seconds are of the
question alone, with processor seconds beside them: on a busy machine, those are the ones to look at. `ready` is what
comes before: importing torch and transformers, and building the model. The peak RSS is that of the whole process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

DEVICE = "h200"
MEMORY = 2**42  # bytes: more than there is on the card, so that all of the models could be trained on it
BUDGETS = {"1B": "0.7x", "8B": "0.9x", "70B": "0.9x"}  # shares of the plain peak that leave the planner a choice
OPTIMIZERS = {"1B": "adamw", "8B": "adamw", "70B": "sgd"}  # of plans: no lever lowers the peak of 70B with AdamW
QUESTIONS = ("estimate", "plan exact", "plan rounding", "curve exact", "curve rounding")

# T7: seconds of an estimate, and of a plan with its curve where there is a target.
TARGETS = {"1B": (1.0, 5.0), "8B": (3.0, 15.0), "70B": (6.0, None)}
MOST_RSS = 10**9

COMMON = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "max_position_embeddings": 131072}
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "1B": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
         "num_key_value_heads": 8, "tie_word_embeddings": True},
        (4, 4096),
    ),
    "8B": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "tie_word_embeddings": False},
        (1, 8192),
    ),
    "70B": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
         "num_key_value_heads": 8, "tie_word_embeddings": False},
        (1, 8192),
    ),
}  # fmt: skip


@contextmanager
def timed(into: dict[str, Any], name: str):
    wall, own = time.perf_counter(), time.process_time()
    yield
    into[f"{name}_seconds"] = time.perf_counter() - wall
    into[f"{name}_processor_seconds"] = time.process_time() - own


def answer(case: str, question: str) -> dict[str, Any]:
    """Ask one question about one model, in this process."""
    shape, (size, length) = CASES[case]
    row: dict[str, Any] = {"case": case, "question": question, "batch": [size, length]}
    with timed(row, "ready"):
        import transformers

        import tightfit
        from tightfit.devices.present import lookup
        from tightfit.tracing.build import build_dry

        device = replace(lookup(DEVICE), memory_bytes=MEMORY)

        config = transformers.LlamaConfig(**COMMON, **shape)
        model = build_dry(lambda: transformers.LlamaForCausalLM(config).train())
        batch = tightfit.TokenBatch(size, length, COMMON["vocab_size"])
    optimizer = "adamw" if question == "estimate" else OPTIMIZERS[case]
    how: dict[str, Any] = {"precision": "bf16", "device": device, "optimizer": optimizer}
    asked: dict[str, Callable[[], Any]] = {
        "estimate": lambda: tightfit.estimate(model, batch, **how),
        "plan exact": lambda: tightfit.plan(model, batch, BUDGETS[case], **how),
        "plan rounding": lambda: tightfit.plan(model, batch, BUDGETS[case], levers="rounding", **how),
        "curve exact": lambda: tightfit.curve(model, batch, **how),
        "curve rounding": lambda: tightfit.curve(model, batch, levers="rounding", **how),
    }
    with timed(row, "answer"):
        found = asked[question]()
    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["peak_bytes"] = getattr(found, "peak_bytes", None)
    row["predicted_step_seconds"] = getattr(found, "step_seconds", None)
    row["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return row


def asked_in_a_fresh_process(case: str, question: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", case, question]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case}, {question}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:4} {row['question']:15} {row['answer_seconds']:7.2f} s, processor "
        f"{row['answer_processor_seconds']:6.2f} s; ready after {row['ready_seconds']:5.2f} s; "
        f"RSS {row['rss_bytes'] / 1e6:5.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--question", choices=QUESTIONS, action="append", help="default: all")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "QUESTION"), help="answer one in this process")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(answer(*options.one)))
        return
    from environment import environment

    where, rows = environment(), []
    for case in options.case or CASES:
        for question in options.question or QUESTIONS:
            rows.append(asked_in_a_fresh_process(case, question))
            print(line(rows[-1]), flush=True)
    if options.output:
        targets = {"seconds": TARGETS, "rss_bytes": MOST_RSS}
        record = {
            "environment": where,
            "device": DEVICE,
            "budgets": BUDGETS,
            "optimizers": OPTIMIZERS,
            "targets": targets,
            "results": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
