"""The longest sequence that a budget can train, planned, and then really run: is its peak within the budget?

One sequence in a batch, bit-exact levers, AdamW. The optimizer's states are made by a step on a short sequence, so that
only one step has the full length; its peak is the allocator's own record.

    python benchmarks/longest_sequence.py [--small] [--output benchmarks/results/longest_sequence.json]
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from taking_turns import options_of, report
from tightfit import TokenBatch, build_dry, maximise
from tightfit.levers.micro_batch import as_parts
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.step import Batch, StepSettings, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

# Preset, vocabulary, budget, and what lengths are a multiple of.
FULL, SMALL = ("mm26", 32_000, "2GB", 64), ("cpu8", 6_400, "160MB", 64)
SHORT = 64  # tokens of the step that makes the states


def measure(small: bool, device: str) -> dict[str, Any]:
    preset, vocabulary, budget, multiple = SMALL if small else FULL

    def model(length: int) -> nn.Module:
        shape = {**PRESETS[preset], "vocab_size": vocabulary, "max_position_embeddings": length}
        return Decoder(DecoderConfig(**shape))

    def case(length: int) -> tuple[nn.Module, Batch]:
        return build_dry(lambda: model(length)), TokenBatch(1, length, vocabulary)

    start = time.perf_counter()
    found = maximise(case, budget, what="sequence_length", multiple_of=multiple, device=device)
    planning_seconds = time.perf_counter() - start
    torch.manual_seed(0)
    real = model(found.value).to(device)
    optimizer = build_optimizer("adamw", real.parameters())

    def step(length: int) -> None:
        batch = {name: t.to(device) for name, t in TokenBatch(1, length, vocabulary).tensors().items()}
        forward_backward(real, as_parts([batch], model_loss), model_loss)
        update(real, optimizer, StepSettings())

    step(SHORT)
    batch = {name: t.to(device) for name, t in TokenBatch(1, found.value, vocabulary).tensors().items()}
    parts = as_parts([batch], model_loss)

    def whole() -> None:
        forward_backward(real, parts, model_loss)
        update(real, optimizer, StepSettings())

    with found.plan.apply(real):
        start = time.perf_counter()
        peak = measured_peak(whole, resident_tensors(real, optimizer, batch))
    return {
        "case": {"preset": preset, "vocabulary": vocabulary, "parameters": sum(p.numel() for p in real.parameters())},
        "longest": found.value,
        "above": None if found.above is None else [found.above.value, found.above.least_bytes],
        "tried": found.tried,
        "planned": found.planned,
        "planning_seconds": planning_seconds,
        "budget_bytes": found.plan.budget_bytes,
        "plain_peak_bytes": found.plan.plain_peak_bytes,
        "predicted_bytes": found.plan.peak_bytes,
        "measured_bytes": peak,
        "within_budget": peak <= found.plan.budget_bytes,
        "predicted_seconds": found.plan.step_seconds,
        "profiled_seconds": time.perf_counter() - start,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=1)
    report(options, measure(options.small, options.device))


if __name__ == "__main__":
    main()
