"""Muon with 8-bit momentum: what bitsandbytes has published for it, and what the same weights and states take here.

    python -m benchmarks.published.muon

https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1973 states the bytes of Qwen3-4B-Base between steps, in
bf16, with momentum in 32 and in 8 bits, and says neither how embedding and norms are updated nor the unit. Dry runs say
what AdamW in 32 bits on them makes of it, and what the optimizers of this package take. Writes
benchmarks/results/published_muon.json; `python benchmarks/optimizers.py --page` shows it.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.environment import ROOT, environment

RESULTS = ROOT / "benchmarks" / "results" / "published_muon.json"
MODEL, CARD, TOKENS = "qwen3-4b", "h100", 64
PUBLISHED = {32: 23.73, 8: 13.63}  # GiB by the difference of the two: see `section`
BLOCK = 256  # numbers that share a scale of 4 bytes


def as_published(bits: int) -> Callable[[Iterable[Any]], Any]:
    """An optimizer with the states that the figures are made of: momentum of matrices in so many bits, AdamW's two
    moments in fp32 for the embedding and for what has one dimension.
    """
    import torch

    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Iterable[Any]):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if self.state[p]:
                    continue
                if p.dim() != 2 or p.shape[0] > 100_000:  # the embedding has a row for each token of the vocabulary
                    made = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
                elif bits == 32:
                    made = {"momentum": torch.zeros_like(p, dtype=torch.float32)}
                else:
                    scales = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
                    made = {"momentum": torch.zeros_like(p, dtype=torch.uint8), "scales": scales}
                self.state[p].update(made)

    return Momentum


def resident(optimizer: Any) -> dict[str, int]:
    """Bytes of weights and states."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tightfit import TokenBatch, estimate
    from tightfit.devices.known import find
    from tightfit.models.published import published
    from tightfit.tracing.build import build_dry
    from tightfit.tracing.record import Category

    fields = dict(published()[MODEL].config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = build_dry(lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    known = find(CARD)
    assert known is not None, CARD
    batch = TokenBatch(1, TOKENS, config.vocab_size)
    found = estimate(model, batch, optimizer=optimizer, device=known.spec).step_figures.by_category
    return {"weights": found[str(Category.PARAMETER)], "states": found[str(Category.OPTIMIZER_STATE)]}


def section(record: dict[str, Any]) -> str:
    """A part of docs/optimizers.md."""
    rows = {row["name"]: row for row in record["rows"]}
    apart = (total(rows["momentum in 32 bits"]) - total(rows["momentum in 8 bits"])) / 2**30
    stated = PUBLISHED[32] - PUBLISHED[8]
    lines = "\n".join(map(line, record["rows"]))
    return f"""\
bitsandbytes [states](https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1973) {PUBLISHED[32]} and \
{PUBLISHED[8]} GB for Qwen3-4B-Base in bf16 between steps, with
Muon's momentum in 32 and in 8 bits. The two differ by {stated:.2f}; dry runs of such states, on all matrices but the
embedding, differ by {apart:.2f} GiB, so the unit is GiB. How the embedding is updated is not said: AdamW in 32 bits is
assumed, and both sums are then too high by about the same (`python -m benchmarks.published.muon`). `muon8bit` keeps 8
more bits of each bf16 weight beside, which those figures have not, and the embedding's states in 8 bits.

| optimizer | weights | states | together | published |
|---|---|---|---|---|
{lines}
"""


def total(row: dict[str, Any]) -> int:
    return row["weights"] + row["states"]


def line(row: dict[str, Any]) -> str:
    figures = [f"{size / 2**30:.2f} GiB" for size in (row["weights"], row["states"], total(row))]
    known = row["published"]
    figures.append("" if known is None else f"{known} ({total(row) / 2**30 / known - 1:+.1%})")
    return f"| {row['name']} | {' | '.join(figures)} |"


def main() -> None:
    asked: list[tuple[str, Any, float | None]] = [
        *((f"momentum in {bits} bits", as_published(bits), figure) for bits, figure in PUBLISHED.items()),
        ("`muon`", "muon", None),
        ("`muon8bit`", "muon8bit", None),
    ]
    rows = [{"name": name, **resident(optimizer), "published": figure} for name, optimizer, figure in asked]
    record = {"environment": environment(), "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(section(record))


if __name__ == "__main__":
    main()
