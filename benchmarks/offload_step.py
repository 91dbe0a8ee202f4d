"""Offloaded activations: how much of them, at what price, and how fast their copies are beside the link itself.

The plain step, one block offloaded and all blocks offloaded take turns. On a CPU the tier is the disk.

    python benchmarks/offload_step.py --small [--output results.json]
    python benchmarks/offload_step.py --device cuda
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from taking_turns import options_of, ratios, report, seconds_of, settle, take_turns
from tightfit.levers.micro_batch import as_parts
from tightfit.levers.offload import offload
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.memory.disk import disk_rates
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.step import TokenBatch, forward_backward, model_loss

FULL, SMALL = ("mm104", 32, 512), ("cpu8", 2, 128)  # preset, sequences, tokens
PATTERNS = {"one block": "layers.0", "all blocks": "layers.*"}
LINK_BYTES = 1 << 28  # copied each way to measure the link of a card


def link_rate(device: str) -> float:
    """Bytes a second to the tier and back, measured now."""
    if device == "cpu":
        rates = disk_rates()
        return 2 / (1 / rates.write_bytes_per_second + 1 / rates.read_bytes_per_second)
    there, here = (
        torch.empty(LINK_BYTES, dtype=torch.uint8, device=device),
        torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True),
    )
    here.copy_(there)
    settle(device)

    def both_ways() -> None:
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)

    return 2 * LINK_BYTES / seconds_of(both_ways, device)


def step_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Forward and backward, the gradients thrown away."""

    def step() -> None:
        forward_backward(model, as_parts([batch], model_loss), model_loss)
        model.zero_grad(set_to_none=True)

    return step


def measure(small: bool, device: str, rounds: int) -> dict[str, Any]:
    preset, size, length = SMALL if small else FULL
    torch.manual_seed(0)
    plain = Decoder(DecoderConfig(**PRESETS[preset])).to(device)
    batch = {n: t.to(device) for n, t in TokenBatch(size, length, plain.config.vocab_size).tensors().items()}
    models = {"plain": plain, **{name: copy.deepcopy(plain) for name in PATTERNS}}
    handles = {name: offload(models[name], pattern) for name, pattern in PATTERNS.items()}
    steps = {name: step_of(model, batch) for name, model in models.items()}
    timed = ratios(take_turns(steps, rounds, device), "plain")
    held = {name: activations(models[name], step, batch) for name, step in steps.items()}
    link, sides = link_rate(device), {}
    for name, times in timed.items():
        sides[name] = {**times, "activation_bytes": held[name], "activations_of_plain": held[name] / held["plain"]}
        if name in handles:
            moved = 2 * handles[name].statistics.high_water_bytes
            added = times["seconds"] - timed["plain"]["seconds"]
            sides[name] |= {"copied_bytes": moved, "copied_per_added_second": moved / added if added > 0 else None}
    return {"case": [preset, size, length], "link_bytes_per_second": link, "sides": sides}


def activations(model: nn.Module, step: Callable[[], None], batch: dict[str, torch.Tensor]) -> int:
    """Peak above parameters, batch and gradients."""
    resident = [*model.parameters(), *model.buffers(), *batch.values()]
    return measured_peak(step, resident) - storage_bytes(resident) - storage_bytes(model.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=5)
    report(options, measure(options.small, options.device, options.rounds))


if __name__ == "__main__":
    main()
