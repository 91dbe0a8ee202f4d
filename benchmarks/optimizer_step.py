"""Optimizers that hold less: device bytes a parameter, and steps against AdamW's, in turns.

Bytes are the measured peak of a step on few tokens, when activations are next to nothing; on a CPU, where the host is
the device, what is offloaded is in them. `benchmarks/optimizers.py` has the bytes of every kind.

    python benchmarks/optimizer_step.py --small [--output results.json]
    python benchmarks/optimizer_step.py --device cuda
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from optimizers import in_backward
from taking_turns import options_of, ratios, report, take_turns
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.step import StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

FULL, SMALL = ("mm104", 32, 512), ("cpu8", 2, 64)  # preset, sequences, tokens: 16k a step
FEW = 16  # tokens of the step whose bytes are measured
KINDS: dict[str, Any] = {
    "adamw": "adamw",
    "offloaded_adamw": "offloaded_adamw",
    "offloaded_adamw:0.5": "offloaded_adamw:0.5",
}
LOW_BIT = "adamw8bit, step in backward"


class Training:
    """A model and its optimizer, and steps on batches of any length."""

    def __init__(self, config: DecoderConfig, kind: Any, device: str):
        torch.manual_seed(0)
        self.model: nn.Module = Decoder(config).to(device)
        self.optimizer = build_optimizer(kind, self.model.parameters())
        self.vocabulary, self.device = config.vocab_size, device

    def step(self, size: int, length: int) -> Callable[[], None]:
        batch = {n: t.to(self.device) for n, t in TokenBatch(size, length, self.vocabulary).tensors().items()}
        parts = as_parts(split_batch(batch, 1), model_loss)

        def step() -> None:
            forward_backward(self.model, parts, model_loss)
            update(self.model, self.optimizer, StepSettings())

        return step

    def bytes_per_parameter(self) -> float:
        step = self.step(1, FEW)
        step()
        peak = measured_peak(step, resident_tensors(self.model, self.optimizer, {}))
        return peak / sum(p.numel() for p in self.model.parameters())


def measure(small: bool, device: str, rounds: int) -> dict[str, Any]:
    preset, size, length = SMALL if small else FULL
    has_low_bit = importlib.util.find_spec("bitsandbytes") is not None
    kinds = KINDS | ({LOW_BIT: in_backward("adamw8bit")} if has_low_bit else {})
    trainings = {name: Training(DecoderConfig(**PRESETS[preset]), kind, device) for name, kind in kinds.items()}
    held = {name: training.bytes_per_parameter() for name, training in trainings.items()}
    steps = {name: training.step(size, length) for name, training in trainings.items()}
    timed = ratios(take_turns(steps, rounds, device), "adamw")
    sides = {
        name: {**times, "throughput_of_adamw": 1 / times["of_plain"], "bytes_per_parameter": held[name]}
        for name, times in timed.items()
    }
    left_out = [] if has_low_bit else [f"{LOW_BIT}: bitsandbytes is not installed"]
    return {"case": [preset, size, length], "sides": sides, "left_out": left_out}


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=5)
    report(options, measure(options.small, options.device, options.rounds))


if __name__ == "__main__":
    main()
