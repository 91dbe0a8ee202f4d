"""What the exact choice inside blocks is worth: the planner's, a greedy one, one rule for all blocks, whole blocks.

    python benchmarks/ablation.py --output benchmarks/results/ablation.json && make benchmarks

All four choose among the same priced options at the same budget, and each choice is traced as applied, tightened as the
planner tightens its own where the trace exceeds the budget. Seconds are predicted, on cards by their published rates
and on the CPU by made-up round figures, so nothing here turns with the machine. Only recompute is allowed.
"""

import argparse
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from environment import ROOT, environment
from tightfit import TokenBatch, build_dry
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Chain, added_seconds, least_peak, peak
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import TIGHTENINGS, Search
from tightfit.step import Precision

MADE_UP = "made-up CPU"
SHARES = (0.05, 0.15, 0.3, 0.5, 0.75)  # of the way from the least peak to the plain one
RULES = 4096  # combinations of one option a kind of blocks, at most
OURS = "exact"
NOTABLE = 0.01  # of a step

# A choice whose peak by its prices is within a bound, or, without a bound, the rule's choice of least peak
Pick = Callable[[Priced, int | None], tuple[int, ...] | None]


@dataclass(frozen=True)
class Case:
    """A model, a batch, and the device that it is planned for."""

    build: Callable[[], nn.Module]
    batch: TokenBatch
    device: str
    precision: Precision = "bf16"


def decoder(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Decoder(DecoderConfig(**settings)).train()


def from_transformers(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(use_cache=False, **settings)
        return transformers.AutoModelForCausalLM.from_config(config).train()

    return build


GEMMA = {
    "vocab_size": 32000, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 18,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 144, "sliding_window": 512,
}  # fmt: skip
CASES: dict[str, Case] = {
    "CPU8": Case(decoder(hidden_size=256, num_layers=8, num_heads=8), TokenBatch(8, 256, 6400), MADE_UP, "fp32"),
    "CPU26": Case(
        decoder(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2),
        TokenBatch(4, 256, 6400),
        MADE_UP,
        "fp32",
    ),
    "MiniMind 104M": Case(
        decoder(hidden_size=768, num_layers=16, num_heads=8, num_kv_heads=2), TokenBatch(32, 512, 6400), "rtx4090"
    ),
    "GPT-2 124M": Case(from_transformers("GPT2"), TokenBatch(8, 1024, 50257), "rtx4090"),
    "Gemma-2 shape": Case(from_transformers("Gemma2", **GEMMA), TokenBatch(8, 1024, 32000), "a100-80"),
    "1B": Case(
        decoder(
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            intermediate_size=8192,
            vocab_size=128256,
            max_position_embeddings=4096,
        ),
        TokenBatch(4, 4096, 128256),
        "h200",
    ),
}


def device_of(case: Case) -> Any:
    if case.device != MADE_UP:
        return case.device
    sys.path.append(str(ROOT / "tests"))
    return importlib.import_module("made_up_devices").even()


# Choices


def greedy(priced: Priced, bound: int | None) -> tuple[int, ...] | None:
    """From the least peak up: whatever saves the most seconds for each byte that it keeps, as long as it fits."""
    chain = priced.chain
    choice = list(least_peak(chain).choice)
    if bound is None:
        return tuple(choice)
    if peak(chain, tuple(choice)) > bound:
        return None
    while True:
        for block, option in ranked(chain, choice):
            tried = [*choice[:block], option, *choice[block + 1 :]]
            if peak(chain, tuple(tried)) <= bound:
                choice = tried
                break
        else:
            return tuple(choice)


def ranked(chain: Chain, choice: Sequence[int]) -> list[tuple[int, int]]:
    """Faster options of each block, the most seconds saved for each byte first."""
    found = []
    for block, options in enumerate(chain.options):
        now = options[choice[block]]
        for index, option in enumerate(options):
            saved, added = now.seconds - option.seconds, option.kept_bytes - now.kept_bytes
            if saved > 0:
                found.append((saved / added if added > 0 else math.inf, block, index))
    return [(block, index) for _, block, index in sorted(found, key=lambda each: (-each[0], each[1]))]


def one_rule(priced: Priced, bound: int | None) -> tuple[int, ...] | None:
    """The fastest rule that treats all blocks of a kind alike."""
    kinds = [graph.kind for graph in priced.graphs]
    options = {kind: range(len(priced.choices[kinds.index(kind)])) for kind in dict.fromkeys(kinds)}
    rules = itertools.islice(itertools.product(*options.values()), RULES)
    choices = (tuple(dict(zip(options, rule, strict=True))[kind] for kind in kinds) for rule in rules)
    if bound is None:
        return min(choices, key=lambda choice: peak(priced.chain, choice))
    fitting = [choice for choice in choices if peak(priced.chain, choice) <= bound]
    return min(fitting, key=lambda choice: added_seconds(priced.chain, choice), default=None)


def whole_blocks(priced: Priced, bound: int | None) -> tuple[int, ...] | None:
    """As many blocks recomputed whole as needed, the first ones; the others keep everything."""
    nothing = [min(range(len(o)), key=lambda i, o=o: o[i].kept_bytes) for o in priced.chain.options]
    if bound is None:
        return tuple(nothing)
    for count in range(len(nothing) + 1):
        choice = (*nothing[:count], *(0 for _ in nothing[count:]))  # option 0 keeps everything
        if peak(priced.chain, choice) <= bound:
            return choice
    return None


PICKS: dict[str, Pick] = {"greedy": greedy, "one rule": one_rule, "whole blocks": whole_blocks}


# Rows


def traced(search: Search, priced: Priced, pick: Pick) -> Candidate | None:
    """A choice as applied, tightened until its trace fits."""
    bound = search.budget_bytes - UNSEEN_BYTES
    for _ in range(TIGHTENINGS):
        choice = pick(priced, bound)
        if choice is None:
            break
        candidate = applied(search, priced, choice)
        excess = search.excess(candidate)
        if excess <= 0:
            return candidate
        bound = min(bound, peak(priced.chain, choice)) - excess
    # Prices are those of single blocks, so a choice may fit although its prices do not, as the planner knows.
    least = pick(priced, None)
    assert least is not None, "without a bound there is a choice"
    candidate = applied(search, priced, least)
    return candidate if search.excess(candidate) <= 0 else None


def applied(search: Search, priced: Priced, choice: tuple[int, ...]) -> Candidate:
    return search.trace_applied(search.request.plain, priced.policies(choice), priced, choice)


def rows(name: str, shares: Sequence[float] = SHARES) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    asked = Request.of(
        build_dry(case.build),
        case.batch.tensors(),
        precision=case.precision,
        device=device_of(case),
        levers=["recompute"],
    )
    request = asked.checked()
    first = Search(request, 1)
    priced = first.baseline(request.plain).priced
    assert priced is not None, "the model has blocks"
    least = traced_least(first, priced)
    plain = first.plain
    for share in shares:
        budget = least + round(share * (plain.peak_bytes - least))
        search = Search(request, budget, priced=first.priced, wholes=first.wholes)
        exact = fastest(search)
        found = {OURS: exact, **{rule: traced(search, priced, pick) for rule, pick in PICKS.items()}}
        yield {
            "case": name,
            "device": case.device,
            "precision": case.precision,
            "batch": list(case.batch[:2]),
            "share": share,
            "budget_bytes": budget,
            "plain_seconds": plain.step_seconds,
            "choices": {rule: figures(candidate) for rule, candidate in found.items()},
        }


def traced_least(search: Search, priced: Priced) -> int:
    """The smallest budget that the least choice fits, as traced."""
    return applied(search, priced, least_peak(priced.chain).choice).needed_bytes


def figures(candidate: Candidate | None) -> dict[str, Any] | None:
    """None: no choice of this rule fits."""
    return None if candidate is None else {"peak_bytes": candidate.peak_bytes, "seconds": candidate.seconds}


def gains(results: Sequence[Mapping[str, Any]], rule: str) -> list[float]:
    """How much longer a step takes with a rule's choice than with the exact one, where it fits."""
    chosen = [row["choices"] for row in results if row["choices"][rule] is not None]
    return [choices[rule]["seconds"] / choices[OURS]["seconds"] - 1 for choices in chosen]


def line(row: Mapping[str, Any]) -> str:
    exact = row["choices"][OURS]
    parts = []
    for rule in PICKS:
        own = row["choices"][rule]
        parts.append(f"{rule} does not fit" if own is None else f"{rule} {own['seconds'] / exact['seconds'] - 1:+.2%}")
    added = exact["seconds"] / row["plain_seconds"] - 1
    return f"{row['case']} on {row['device']}, {row['share']:.0%}: exact +{added:.2%} of plain; {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results, where = [], environment()
    for name in options.case or CASES:
        for row in rows(name):
            print(line(row), flush=True)
            results.append(row)
    if options.output:
        record = {"environment": where, "results": results}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
