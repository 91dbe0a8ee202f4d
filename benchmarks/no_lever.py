"""Nothing applied costs nothing: the trainer without a lever against a loop written by hand, batch for batch.

Both train the same model on the same batches, in turns of ten steps; what is timed is everything between two batches:
gradients, clipping, schedule, optimizer, and in the trainer its metrics and their file as well. A share of a short step
is less time than the same share of a long one, so the CPU's model takes both kinds of steps.

    python benchmarks/no_lever.py --small [--output results.json]
    python benchmarks/no_lever.py --device cuda
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from taking_turns import options_of, report, settle
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.step import StepSettings, TokenBatch
from tightfit.training.config.schema import TrainingConfig
from tightfit.training.interrupt import Interrupt
from tightfit.training.loop import SETTLED, measured_steps, run_steps
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.reporter import SilentReporter
from tightfit.training.stepper import Stepper
from tightfit.training.storage import RunFolder

FULL, SMALL = (("mm26", 32, 512),), (("cpu8", 8, 256), ("cpu8", 2, 64))  # preset, sequences, tokens
STEPS = 10


class Clocked:
    """Batches that note when each was asked for."""

    def __init__(self, batch: dict[str, Any], device: str):
        self.batch, self.device = batch, device
        self.asked: list[float] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            settle(self.device)
            self.asked.append(time.perf_counter())
            yield self.batch

    def seconds(self) -> list[float]:
        """Of the settled steps that the trainer does not profile; the last one is not followed by a batch."""
        profiled = measured_steps(STEPS)
        steps = enumerate(zip(self.asked, self.asked[1:], strict=False), start=1)
        return [after - before for number, (before, after) in steps if number > SETTLED and number not in profiled]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[dict[str, Any]], device: str) -> None:
    """What somebody writes who has no trainer."""
    loss = CausalLMLoss()
    for _ in range(STEPS):
        value = loss(model, counted(next(batches), device))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value.item()


def measure(small: bool, device: str, rounds: int) -> dict[str, Any]:
    return {"cases": [measured(*case, device, rounds) for case in (SMALL if small else FULL)]}


def measured(preset: str, size: int, length: int, device: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**PRESETS[preset])).to(device).train()
    training = TrainingConfig(max_steps=STEPS, batch_size=size, grad_clip=1.0)
    optimizer = OptimizerRecipe(training)(model.parameters())
    stepper = Stepper(model, optimizer, CausalLMLoss(), StepSettings("fp32", 1.0), micro_batches=1)
    batch = TokenBatch(size, length, model.config.vocab_size).tensors()
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as place, RunFolder(f"{place}/run").claimed(overwrite=False):
        folder = RunFolder(f"{place}/run")
        for turn in range(rounds):
            trainer, hand = Clocked(batch, device), Clocked(batch, device)
            runs = [
                lambda clock=trainer: run_steps(stepper, iter(clock), training, folder, SilentReporter(), Interrupt()),
                lambda clock=hand: by_hand(model, optimizer, iter(clock), device),
            ]
            for run in runs[:: 1 if turn % 2 else -1]:
                run()
            pairs.append((statistics.median(trainer.seconds()), statistics.median(hand.seconds())))
    ratios = [trainer / hand for trainer, hand in pairs]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "case": [preset, size, length],
        "trainer_seconds": statistics.median(trainer for trainer, _ in pairs),
        "by_hand_seconds": statistics.median(hand for _, hand in pairs),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=10)
    report(options, measure(options.small, options.device, options.rounds))


if __name__ == "__main__":
    main()
