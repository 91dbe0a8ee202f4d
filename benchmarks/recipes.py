"""Recipes really trained: every row of `tightfit.fit` that fits is trained three steps on the CPU.

    python benchmarks/recipes.py [--output benchmarks/results/recipes.json] [--only NAME ...]

Three tiny models: the reference decoder, and a Llama and a GPT-2 of `transformers` with new weights, which get adapters
on all four bases too. For each, the table is made for a budget in which some rows need levers. Each row that fits is
then built with real weights, trained for three steps with its plan applied, and the third step's peak is taken from the
allocator's own record. The error compares it with the predicted peak.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tightfit
from environment import ROOT, environment
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.adapters import add_adapter
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.dtypes import WEIGHT_DTYPES, convert_weights
from tightfit.optim.by_name import build_optimizer
from tightfit.recipes.records import Outcome, Recipe
from tightfit.recipes.variants import optimizer_of
from tightfit.step import StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

STEPS = 3
SHARE = 0.8  # of the plain peak of AdamW on fp32 weights: the budget
BATCH = TokenBatch(2, 64, 512)


def own() -> nn.Module:
    return Decoder(
        DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=512, max_position_embeddings=512)
    )


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


MODELS: dict[str, Callable[[], nn.Module]] = {"decoder": own, "llama": llama, "gpt2": gpt2}


def held(make: Callable[[], nn.Module], recipe: Recipe) -> nn.Module:
    """The model with real weights, as the recipe holds it."""
    torch.manual_seed(0)
    model, adapter = make(), recipe.adapter
    kept = adapter.base if adapter is not None and adapter.base in WEIGHT_DTYPES else recipe.dtype
    convert_weights(model, WEIGHT_DTYPES[kept])
    return model if adapter is None else add_adapter(model, adapter).train()


def measured(model: nn.Module, outcome: Outcome) -> int:
    """The peak of the third real step with the recipe's plan applied."""
    recipe, plan = outcome.recipe, outcome.plan
    assert plan is not None, "small models have a plan for every row"
    settings = StepSettings(recipe.precision)
    optimizer: Any = build_optimizer(optimizer_of(recipe), model.parameters())
    batch = BATCH.tensors()
    parts = as_parts(split_batch(batch, outcome.micro_batches), model_loss)

    def step() -> None:
        forward_backward(model, parts, model_loss, recipe.precision)
        update(model, optimizer, settings)

    with plan.apply(model):  # pyright: ignore[reportAttributeAccessIssue] - a Plan
        for _ in range(STEPS - 1):
            step()
        return measured_peak(step, resident_tensors(model, optimizer, [part.batch for part in parts]))


def made_up_cpu() -> Any:
    """The figures of a CPU that the tests plan with: seconds do not matter here, and bytes do not depend on them."""
    sys.path.append(str(ROOT / "tests"))
    return importlib.import_module("made_up_devices").even()


def trained(name: str) -> dict[str, Any]:
    """All rows of one model."""
    make = MODELS[name]
    device = made_up_cpu()
    plain = tightfit.estimate(make(), BATCH, device=device).peak_bytes
    budget = int(SHARE * plain)
    found = tightfit.fit(make(), BATCH, device=device, budget=budget)
    rows = []
    for outcome in found.fitting:
        peak = measured(held(make, outcome.recipe), outcome)
        row = {
            "recipe": outcome.name,
            "levers": list(outcome.levers),
            "micro_batches": outcome.micro_batches,
            "predicted": outcome.peak_bytes,
            "measured": peak,
            "error": outcome.peak_bytes / peak - 1,
            "within_budget": peak <= budget,
        }
        rows.append(row)
        print(f"{name}: {outcome.name}: {row['error']:+.4%}, {', '.join(outcome.levers) or 'no lever'}", flush=True)
    return {"model": name, "budget": budget, "plain": plain, "recipes": len(found), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "recipes.json")
    options = parser.parse_args()
    results = []
    for name in options.only:
        results.append(trained(name))
        record = {"environment": environment(), "steps": STEPS, "results": results}
        options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    errors = [abs(row["error"]) for result in results for row in result["rows"]]
    inside = [row["within_budget"] for result in results for row in result["rows"]]
    print(f"{len(errors)} rows: worst error {max(errors):.4%}; {sum(inside)} within their budget")


if __name__ == "__main__":
    main()
