"""Predicted against measured seconds of whole training steps on this machine's CPU: plain, and under plans.

    python benchmarks/step_time.py --output benchmarks/results/step_time.json && python benchmarks/accuracy_page.py

The device is measured at the start of the same run (unless `--spec` names a calibration), and every prediction is made
before the step is first run. Steps of a model's variants are interleaved, after two that warm up. The error is that of
the prediction against the median step; the least is there because other processes can only make a step longer. What
others took of the machine meanwhile is in the file: figures of a machine that was not quiet say little. With one
thread, the median processor seconds, which do not count waiting for a core, stand beside them.

A virtual machine's own speed changes between minutes. So the small steps that a calibration runs are run again right
after it and in each round. Their drift says how much slower the machine was than when it was calibrated, and the
error beside it is what is left of the prediction's error without that.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accuracy import decoder, from_transformers
from environment import environment
from tightfit import Plan, TokenBatch, estimate, plan
from tightfit.devices import rough
from tightfit.devices.calibrate import calibrate
from tightfit.devices.in_steps import StepTimes
from tightfit.devices.quiet import Observation, ProcessorTimes
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.planner.levers import ChunkedLoss
from tightfit.step import StepSettings, forward_backward, model_loss, update

WARM_UP = 2
REFERENCES = 6  # samples of the calibration's own steps, right after it
RESULT = Path(__file__).parent / "results" / "step_time.json"
REFERENCE = Path(rough.__file__).with_name("cpu.json")  # whose figures a CPU has that was not measured yet
BUDGETS = ("0.75x", "0.55x")  # of the plain peak, with the levers that are exact to rounding


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    build: Callable[[], nn.Module]
    batch: tuple[int, int]
    vocabulary: int
    precision: Any = "fp32"


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(vocab_size=8000, n_embd=384, n_layer=6, n_head=6, n_positions=512)
    return transformers.GPT2LMHeadModel(config).train()


CASES = {
    "CPU8, 8 x 256": Case(lambda: decoder(hidden_size=256), (8, 256), 6400),
    "CPU8, 8 x 256, bf16": Case(lambda: decoder(hidden_size=256), (8, 256), 6400, "bf16"),
    "CPU8, 1 x 2048": Case(lambda: decoder(hidden_size=256, max_position_embeddings=2048), (1, 2048), 6400),
    "CPU26, 4 x 256": Case(lambda: decoder(hidden_size=512, num_kv_heads=2), (4, 256), 6400),
    "CPU26, 4 x 256, bf16": Case(lambda: decoder(hidden_size=512, num_kv_heads=2), (4, 256), 6400, "bf16"),
    "Llama 20M, 4 x 256": Case(lambda: from_transformers("Llama"), (4, 256), 8000),
    "Qwen3 20M, 4 x 256": Case(lambda: from_transformers("Qwen3", head_dim=64), (4, 256), 8000),
    "GPT-2 14M, 4 x 256": Case(gpt2, (4, 256), 8000),
}


class Reference:
    """The calibration's own small steps, which tell how the machine's speed has changed since the calibration."""

    def __init__(self) -> None:
        self.steps = StepTimes()
        self.calibrated = self.seconds(REFERENCES)
        self.begin()

    def seconds(self, samples: int) -> dict[bool, float]:
        """Median seconds of a step, by whether it is in bf16."""
        self.begin()
        for _ in range(samples):
            self.steps.sample()
        return {half: statistics.median(found) for half, found in self.steps.seconds.items()}

    def begin(self) -> None:
        """Forget what was timed so far."""
        self.steps.seconds = {False: [], True: []}

    def drift(self, precision: str) -> float:
        """How much longer a step takes since `begin` than after the calibration: 1.0 for as long."""
        half = precision == "bf16"
        return statistics.median(self.steps.seconds[half]) / self.calibrated[half]


@dataclass
class Variant:
    """One way to run the steps of a model; `seconds` are those measured."""

    name: str
    predicted: float
    made: Plan | None
    seconds: list[float]
    processor_seconds: list[float]

    @property
    def micro_batches(self) -> int:
        return 1 if self.made is None else self.made.micro_batches


def variants(model: nn.Module, batch: dict[str, torch.Tensor], precision: Any, device: DeviceSpec) -> list[Variant]:
    """The plain step and the plans, with the seconds that are predicted for them."""
    found = [Variant("plain", estimate(model, batch, precision=precision, device=device).step_seconds, None, [], [])]
    for budget in BUDGETS:
        try:
            made = plan(model, batch, budget, levers="rounding", precision=precision, device=device)
        except CannotFit:
            continue
        found.append(Variant(budget, made.step_seconds, made, [], []))
    return found


def measure(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    precision: Any,
    found: list[Variant],
    rounds: int,
    reference: Reference,
) -> None:
    """Run the variants in turns; the first rounds warm up and are not kept."""
    reference.begin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for turn in range(WARM_UP + rounds):
        for variant in found:
            parts = as_parts(split_batch(batch, variant.micro_batches), model_loss)
            with nullcontext() if variant.made is None else variant.made.apply(model):
                began, began_own = time.perf_counter(), time.process_time()
                forward_backward(model, parts, model_loss, precision)
                update(model, optimizer, StepSettings(precision))
                seconds, own = time.perf_counter() - began, time.process_time() - began_own
            if turn >= WARM_UP:
                variant.seconds.append(seconds)
                variant.processor_seconds.append(own)
        reference.steps.sample()


def rows(name: str, case: Case, device: DeviceSpec, rounds: int, reference: Reference) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model = case.build()
    batch = TokenBatch(*case.batch, case.vocabulary).tensors()
    found = variants(model, batch, case.precision, device)
    began = ProcessorTimes.now()
    measure(model, batch, case.precision, found, rounds, reference)
    others = ProcessorTimes.now().others_since(began)
    drift = reference.drift(case.precision)
    for variant in found:
        median = statistics.median(variant.seconds)
        yield {
            "case": name,
            "precision": case.precision,
            "variant": variant.name,
            "predicted_seconds": variant.predicted,
            "median_seconds": median,
            "least_seconds": min(variant.seconds),
            "median_processor_seconds": statistics.median(variant.processor_seconds),
            "error": variant.predicted / median - 1,
            "error_against_least": variant.predicted / min(variant.seconds) - 1,
            "drift": drift,
            "error_beside_drift": variant.predicted * drift / median - 1,
            "micro_batches": variant.micro_batches,
            "chunked_loss": variant.made is not None and variant.made.lever(ChunkedLoss) is not None,
            "others_cores": others,
            "disturbed_by": disturbance(others),
        }


def disturbance(others: float) -> str:
    return Observation(others, torch.get_num_threads(), torch.get_num_threads()).disturbed_by


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:22} {row['variant']:6} predicted {row['predicted_seconds'] * 1e3:8.1f} ms, median "
        f"{row['median_seconds'] * 1e3:8.1f} ms {row['error']:+7.1%}, least {row['least_seconds'] * 1e3:8.1f} ms "
        f"{row['error_against_least']:+7.1%}; processor {row['median_processor_seconds'] * 1e3:8.1f} ms; "
        f"others {row['others_cores']:.1f} cores; drift {row['drift']:.3f}, beside it {row['error_beside_drift']:+7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spec", type=Path, help="a calibration in JSON, instead of one made now")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    where = environment()
    device = calibrate("cpu") if options.spec is None else DeviceSpec.from_json(options.spec)
    print(f"calibration: {device.disturbed_by or 'quiet'}", flush=True)
    results = []
    reference = Reference()
    for name in options.case or CASES:
        for row in rows(name, CASES[name], device, options.rounds, reference):
            print(line(row), flush=True)
            results.append(row)
            if options.output:
                record = {
                    "environment": where,
                    "device": device.to_dict(),
                    "rounds": options.rounds,
                    "results": results,
                }
                options.output.write_text(json.dumps(record, indent=1) + "\n")
    if options.output is not None and options.output.resolve() == RESULT:
        REFERENCE.write_text(json.dumps(device.to_dict()) + "\n")


if __name__ == "__main__":
    main()
