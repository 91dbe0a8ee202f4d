"""What checkpoints cost a training: seconds of a save in front of it and beside it, against seconds of its steps.

A save each 50 steps lengthens a training by `save_seconds / (50 * step_seconds)` where the training waits for it. In
the background the training waits for the copy alone; the thread that writes takes what the processor has left, so that
steps beside it are measured too, in turns with steps alone.

    python benchmarks/checkpoint_time.py [--small] [--rounds 5] [--output benchmarks/results/checkpoint_time.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from environment import environment
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import PRESETS, DecoderConfig
from tightfit.step import StepSettings, TokenBatch
from tightfit.training.checkpoint.background import BackgroundSaver
from tightfit.training.checkpoint.store import Checkpoints
from tightfit.training.checkpoint.tensors import copy_bytes
from tightfit.training.config import TrainingConfig
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.stepper import Stepper

FULL, SMALL = ("cpu26", 8, 256), ("cpu8", 2, 64)  # preset, sequences, tokens
EVERY = 50  # steps between two saves


class Taken(NamedTuple):
    """Seconds by the clock, and of all processors together: on a busy machine only those say what something costs."""

    clock: float
    processor: float


def seconds_of(call: Callable[[], Any]) -> Taken:
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return Taken(time.perf_counter() - clock, time.process_time() - processor)


def median(taken: Sequence[Taken]) -> Taken:
    return Taken(statistics.median(t.clock for t in taken), statistics.median(t.processor for t in taken))


def measure(preset: str, size: int, length: int, rounds: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**PRESETS[preset]))
    training = TrainingConfig()
    optimizer = OptimizerRecipe(training)(model.parameters())
    stepper = Stepper(model, optimizer, CausalLMLoss(), StepSettings("fp32", 1.0), micro_batches=1)
    batch = counted(TokenBatch(size, length, model.config.vocab_size).tensors())
    stepper.step(batch)
    state = stepper.state.capture()
    checkpoints = Checkpoints(folder)
    alone, beside, in_front, waited = [], [], [], []
    with BackgroundSaver(checkpoints) as saver:
        saver.save(1, state.tensors, state.record)  # it makes the copies, which stay
        saver.wait()
        for number in range(rounds):
            alone.append(seconds_of(partial(stepper.step, batch)))
            state = stepper.state.capture()
            in_front.append(seconds_of(partial(checkpoints.save, 2 * number + 2, state.tensors, state.record)))
            checkpoints.prune(1)
            waited.append(seconds_of(partial(saver.save, 2 * number + 3, state.tensors, state.record)))
            while saver.is_saving:
                beside.append(seconds_of(partial(stepper.step, batch)))
            saver.wait()
            checkpoints.prune(1)
    found = checkpoints.newest_intact().checkpoint
    assert found is not None
    loading = [seconds_of(lambda: stepper.state.restore(found)) for _ in range(2)]
    verifying = [seconds_of(found.verify) for _ in range(2)]
    step, save, copy = (median(taken) for taken in (alone, in_front, waited))
    slower = sum(max(0.0, taken.clock - step.clock) for taken in beside) / rounds
    return {
        "case": [preset, size, length],
        "bytes": copy_bytes(state.tensors),
        "step": step._asdict(),
        "save": save._asdict(),
        "copy": copy._asdict(),
        "step_beside_a_save": median(beside)._asdict() if beside else None,
        "verify": median(verifying)._asdict(),
        "load": median(loading)._asdict(),
        "longer": {
            "in_front": save.clock / (EVERY * step.clock),
            "in_front_by_processor_time": save.processor / (EVERY * step.processor),
            "in_background": (copy.clock + slower) / (EVERY * step.clock),
        },
        "all": {"alone": alone, "in_front": in_front, "waited": waited, "beside": beside},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go: a folder on the disk to be measured")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        case = SMALL if options.small else FULL
        found = {"environment": environment(), **measure(*case, options.rounds, Path(folder))}
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
