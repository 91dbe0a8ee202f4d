"""Predicted against measured seconds of a real training step, operator by operator, on this machine's CPU.

    python benchmarks/operator_time.py [--case cpu26 --precision fp32] [--rounds 6] [--output FILE]

The device is calibrated in the same run. Operators' figures are the least over the rounds, since other processes can
only make them larger; on a busy machine run it with one thread (OMP_NUM_THREADS=1), since threads that wait for each
other multiply the disturbance. Plain steps run before those whose operators are timed one by one, for what the timer
keeps would break up the heap.
"""

import argparse
import json
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from environment import environment
from tightfit.devices.calibrate import calibrate
from tightfit.devices.cost import CostModel
from tightfit.devices.work import work_of
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.decoder_config import PRESETS
from tightfit.runtime.operators import traits_of
from tightfit.step import Part, StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.tracing.shapes import TensorShape

BATCHES = {"cpu8": TokenBatch(8, 256, 6400), "cpu26": TokenBatch(4, 256, 6400)}
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Called:
    """One operator call of the step."""

    name: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    arguments: tuple[Any, ...]


class OperatorTimer(TorchDispatchMode):
    """Times each operator that computes something; writes down what was called only where asked to."""

    def __init__(self, *, called: list[Called] | None = None) -> None:
        super().__init__()
        self.called = called
        self.seconds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        began = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - began
        if not traits_of(func).is_view:
            self.seconds.append(seconds)
            if self.called is not None:
                constants = tuple(a for a in args if not isinstance(a, torch.Tensor))
                self.called.append(Called(str(func), _shapes((args, kwargs)), _shapes(result), constants))
        return result


def _shapes(tree: Any) -> tuple[TensorShape, ...]:
    return tuple(TensorShape.of(t) for t in tree_iter(tree) if isinstance(t, torch.Tensor))


def training_step(case: str, precision: Any) -> Callable[[], None]:
    """A step of the reference decoder with AdamW."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**PRESETS[case]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = BATCHES[case].tensors()

    def step() -> None:
        forward_backward(model, [Part(batch, 1.0)], model_loss, precision)
        update(model, optimizer, StepSettings(precision))

    return step


class PlainStep(NamedTuple):
    """One step with nobody watching: by the clock, in user mode on all threads, in the system; page faults."""

    seconds: float
    user_seconds: float
    system_seconds: float
    page_faults: int


def plain_step(step: Callable[[], None]) -> PlainStep:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return PlainStep(seconds, user, system, after.ru_minflt - before.ru_minflt)


def measure(step: Callable[[], None], rounds: int) -> tuple[list[PlainStep], list[Called], list[list[float]]]:
    """Plain steps after two warm-up steps; the operators of a step, and their seconds in each timed step."""
    step()
    step()
    plain = [plain_step(step) for _ in range(rounds)]
    called: list[Called] = []
    with OperatorTimer(called=called):
        step()
    timed = []
    for _ in range(rounds):
        with OperatorTimer() as timer:
            step()
        timed.append(timer.seconds)
    return plain, called, timed


def compare(model: CostModel, case: str, precision: str, rounds: int) -> dict[str, Any]:
    """One case: totals, and predicted and measured seconds of each family and of the costliest operators."""
    plain, called, timed = measure(training_step(case, precision), rounds)
    families: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    signatures: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for call, *spent in zip(called, *timed, strict=True):
        measured = min(spent)
        work = work_of(call.name, call.inputs, call.outputs, call.arguments)
        label = f"{call.name} {' '.join(f'{str(t.dtype)[6:]}{list(t.shape)}' for t in call.inputs[:3])}"
        for table, key in ((families, str(work.family)), (signatures, label)):
            table[key][0] += model.seconds(work)
            table[key][1] += measured
    costliest = sorted(signatures.items(), key=lambda item: -item[1][1])[:25]
    return {
        "case": case,
        "precision": precision,
        "predicted_seconds": sum(predicted for predicted, _ in families.values()),
        "operators_seconds": sum(measured for _, measured in families.values()),
        "operators_seconds_median": statistics.median(map(sum, timed)),
        "step_seconds_least": min(step.seconds for step in plain),
        "step_seconds_median": statistics.median(step.seconds for step in plain),
        "plain_steps": [step._asdict() for step in plain],
        "operators": len(called),
        "families": {k: {"predicted": p, "measured": m} for k, (p, m) in families.items()},
        "costliest": [{"operator": k, "predicted": p, "measured": m} for k, (p, m) in costliest],
    }


def show(result: dict[str, Any], verbose: bool) -> None:
    """A table of the families, the costliest first, and the totals."""
    print(f"\n{result['case']} {result['precision']}: {result['operators']} operators")
    print(f"{'family':24}{'predicted':>12}{'measured':>12}{'ratio':>8}")
    rows = list(result["families"].items())
    if verbose:
        rows += [(c["operator"], c) for c in result["costliest"]]
    for name, row in sorted(rows, key=lambda item: -item[1]["measured"]):
        if row["measured"] > 0:
            ratio = row["predicted"] / row["measured"]
            print(f"{name:24}{row['predicted'] * 1e3:9.2f} ms{row['measured'] * 1e3:9.2f} ms{ratio:8.2f}")
    predicted = result["predicted_seconds"]
    for name in ("operators_seconds", "operators_seconds_median", "step_seconds_least", "step_seconds_median"):
        print(f"{name:24}{predicted * 1e3:9.2f} ms{result[name] * 1e3:9.2f} ms{predicted / result[name]:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=sorted(BATCHES), help="one case; all by default")
    parser.add_argument("--precision", choices=PRECISIONS, help="one precision; all by default")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--operators", action="store_true", help="show the costliest operators too")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    began = time.perf_counter()
    spec = calibrate("cpu")
    calibration_seconds = time.perf_counter() - began
    results = []
    for case in [options.case] if options.case else sorted(BATCHES):
        for precision in [options.precision] if options.precision else PRECISIONS:
            results.append(compare(CostModel(spec), case, precision, options.rounds))
            show(results[-1], options.operators)
    if options.output:
        record = {"environment": environment(), "calibration_seconds": calibration_seconds, "spec": asdict(spec)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
