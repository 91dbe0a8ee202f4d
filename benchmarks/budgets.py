"""Twenty budgets for five models: is every plan within its budget, and does a smaller budget never take more memory?

    python benchmarks/budgets.py --output benchmarks/results/budgets.json --table docs/budgets.md

Budgets run evenly from the plain peak down to the least that can be reached, levers exact to rounding allowed. For each
the plan's peak is compared with what the CPU allocator records of the second real step under it. From each budget to
the next smaller one the peak must not rise and the predicted seconds must not fall. Models that are not asked for keep
the figures that the output has of them.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accuracy import Case, measure
from environment import environment
from tightfit import TokenBatch, estimate, plan
from tightfit.errors import CannotFit
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.levers import ChunkedLoss

BUDGETS = 20
SIZE, LENGTH, VOCABULARY = 4, 256, 6400


def decoder(**settings: Any) -> nn.Module:
    sizes = {"hidden_size": 256, "num_layers": 6, "num_heads": 8, "vocab_size": VOCABULARY}
    return Decoder(DecoderConfig(**{**sizes, **settings}))


def from_transformers(name: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).train()


LLAMA_LIKE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder, grouped queries": lambda: decoder(num_kv_heads=2),
    "decoder, tied, dropout 0.1": lambda: decoder(tie_embeddings=True, dropout=0.1),
    "Llama": lambda: from_transformers("Llama", **LLAMA_LIKE),
    "Qwen3": lambda: from_transformers("Qwen3", **LLAMA_LIKE, num_key_value_heads=4, head_dim=32),
    "GPT-2": lambda: from_transformers("GPT2", n_embd=256, n_layer=6, n_head=8, n_positions=LENGTH),
}
CASES = {name: Case(build, (SIZE, LENGTH)) for name, build in MODELS.items()}


def rows(case: str, count: int) -> Iterator[dict[str, Any]]:
    """A row for each budget, the largest first."""
    torch.manual_seed(0)
    model = CASES[case].build()
    batch = TokenBatch(SIZE, LENGTH, VOCABULARY).tensors()
    plain = estimate(model, batch).peak_bytes
    try:
        plan(model, batch, 1, levers="rounding")
    except CannotFit as error:
        least = error.least_bytes
    else:
        raise SystemExit(f"{case}: one byte fits nothing")
    for step in range(count):
        budget = plain - step * (plain - least) // (count - 1)
        made = plan(model, batch, budget, levers="rounding")
        with made.apply(model):
            measured = measure(model, batch, CASES[case], made.micro_batches)
        yield {
            "case": case,
            "budget_bytes": budget,
            "plain_bytes": plain,
            "predicted": made.peak_bytes,
            "measured": measured,
            "step_seconds": made.step_seconds,
            "micro_batches": made.micro_batches,
            "chunked_loss": made.lever(ChunkedLoss) is not None,
        }


def judged(case: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rows of one model show."""
    return {
        "case": case,
        "plans": len(found),
        "plain_bytes": found[0]["plain_bytes"],
        "least_bytes": found[-1]["budget_bytes"],
        "predicted_within": sum(row["predicted"] <= row["budget_bytes"] for row in found),
        "measured_within": sum(row["measured"] <= row["budget_bytes"] for row in found),
        "worst_error": max(abs(row["predicted"] / row["measured"] - 1) for row in found),
        "peak_rises": sum(b["predicted"] > a["predicted"] for a, b in pairwise(found)),
        "seconds_fall": sum(b["step_seconds"] < a["step_seconds"] for a, b in pairwise(found)),
    }


PAGE = """\
# Budgets

Written by `python benchmarks/budgets.py`; the figures are in `benchmarks/results/budgets.json`.
{cpu}, {threads} threads, torch {torch}; batch {size} x {length}, fp32, AdamW; levers exact to rounding allowed.

The budgets are evenly spaced from the plain peak down to the least peak that can be reached. "Predicted within" and
"measured within" count the plans whose peak is at most the budget. The CPU allocator's record is the measured peak. The
last two columns count how often the peak rose, and how often the predicted seconds fell, from one budget to the next
smaller one. Neither should happen.

| model | plain peak | least | plans | predicted within | measured within | worst error | peak rose | seconds fell |
|---|---|---|---|---|---|---|---|---|
"""


def page(results: list[dict[str, Any]], where: dict[str, Any]) -> str:
    """The table for the documentation."""
    head = PAGE.format(
        cpu=where["machine"]["cpu"],
        threads=where["threads"],
        torch=where["versions"]["torch"],
        size=SIZE,
        length=LENGTH,
    )
    return head + "".join(
        f"| {r['case']} | {r['plain_bytes']:,} | {r['least_bytes']:,} | {r['plans']} | {r['predicted_within']} "
        f"| {r['measured_within']} | {r['worst_error']:.5%} | {r['peak_rises']} | {r['seconds_fall']} |\n"
        for r in results
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--budgets", type=int, default=BUDGETS)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    cases, where = options.case or list(CASES), environment()
    kept = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    found = [row for row in kept.get("plans", ()) if row["case"] not in cases]
    results = [result for result in kept.get("results", ()) if result["case"] not in cases]
    for case in cases:
        own = []
        for row in rows(case, options.budgets):
            own.append(row)
            print(
                f"{case:28s} budget {row['budget_bytes']:>12,} predicted {row['predicted']:>12,} "
                f"measured {row['measured']:>12,} {row['step_seconds'] * 1e3:8.1f} ms",
                flush=True,
            )
        found += own
        results.append(judged(case, own))
        if options.output:
            record = {"environment": where, "results": results, "plans": found}
            options.output.write_text(json.dumps(record, indent=1) + "\n")
        if options.table:
            options.table.write_text(page(results, where))


if __name__ == "__main__":
    main()
