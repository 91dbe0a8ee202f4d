"""Time against peak: every peer of peer_trainings.py and our plans at their peaks, on the same model in the same run.

    python benchmarks/peers.py --output benchmarks/results/peers.json && make benchmarks

Each way has a process of its own. The processes take turns, step by step, with PyTorch's per-block checkpoint among
them; a ratio is the median of the ratios to it within one round. Peaks are the CPU allocator's own record. After the
peers, plans run at their measured peaks, with each kind of levers. `--rounds 0` measures peaks only, which a busy
machine does not change. A peer that does not run here is kept with its reason.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tightfit
from environment import environment
from peer_trainings import AGAINST_ACTIVATIONS, PEERS, REFERENCE, NotHere, adamw
from tightfit.errors import CannotFit
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.recompute import RECOMPUTE_ALL
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.step import StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.training.loop import resident_tensors

SECONDS = 1200  # after which a process is given up
LEAVING = 10  # seconds that a process has to end by itself
TOGETHER = 8  # processes at a time, the reference included: each holds a model with its states
APART = 1.01  # peaks that are nearer to each other share a plan
LEVERS: dict[str, str | list[str]] = {
    "exact": "exact",
    "captured": ["exact", "capture"],
    "rounding": "rounding",
    "captured rounding": ["rounding", "capture"],
    "compiled": ["recompute", "chunked_loss", "micro_batch", "compile"],
}


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    build: Callable[[], nn.Module]
    batch: TokenBatch
    glob: str  # the blocks, for the levers that are applied by hand


def of_transformers(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(use_cache=False, **settings)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def gpt2() -> nn.Module:
    return of_transformers("GPT2", vocab_size=8000, n_embd=384, n_layer=8, n_head=6, n_positions=512)


def llama() -> nn.Module:
    shape = {"hidden_size": 448, "intermediate_size": 1216, "num_hidden_layers": 8, "num_attention_heads": 7}
    return of_transformers("Llama", vocab_size=8000, num_key_value_heads=7, max_position_embeddings=1024, **shape)


def decoder(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Decoder(DecoderConfig(**settings)).train()


CASES: dict[str, Case] = {
    "CPU26": Case(
        decoder(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=2), TokenBatch(4, 256, 6400), "layers.*"
    ),
    "CPU8": Case(decoder(hidden_size=256, num_layers=8, num_heads=8), TokenBatch(8, 256, 6400), "layers.*"),
    "GPT-2": Case(gpt2, TokenBatch(4, 256, 8000), "transformer.h.*"),
    "Llama": Case(llama, TokenBatch(4, 256, 8000), "model.layers.*"),
    "tiny": Case(decoder(hidden_size=16, num_layers=2, num_heads=2, vocab_size=32), TokenBatch(2, 16, 32), "layers.*"),
}
BY_HAND: dict[str, Callable[[nn.Module, str], Any]] = {
    "recompute, every block": tightfit.recompute,
    "captured, keep all": tightfit.capture,
    "captured, recompute all": lambda model, glob: tightfit.capture(model, glob, policy=RECOMPUTE_ALL),
    "compiled blocks": tightfit.compile_blocks,
}


@dataclass(frozen=True)
class Way:
    """How a step runs: a peer, a lever by hand, or a plan with some levers at a budget."""

    name: str
    levers: str | None = None
    budget: int | None = None

    @property
    def ours(self) -> bool:
        return self.levers is not None or self.name in BY_HAND

    @property
    def source(self) -> str:
        return "tightfit" if self.ours else PEERS[self.name].source


# In the process of a way


class Trained:
    """A model with its optimizer, ready to step."""

    def __init__(self, case: Case, way: Way, device: Any = None):
        torch.manual_seed(0)
        self.model, self.batch = case.build(), case.batch.tensors()
        self.loss, self.micro_batches, optimizer = model_loss, 1, adamw
        self.plan: tightfit.Plan | None = None
        if way.levers is not None:
            assert way.budget is not None, "a plan has a budget"
            self.plan = tightfit.plan(self.model, self.batch, way.budget, levers=LEVERS[way.levers], device=device)
            self.applied = self.plan.apply(self.model)
            self.micro_batches = self.plan.micro_batches
        elif way.name in BY_HAND:
            self.applied = BY_HAND[way.name](self.model, case.glob)
        else:
            peer = PEERS[way.name]
            peer.apply(self.model)
            self.loss, optimizer = peer.loss, peer.optimizer
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.parts = as_parts(split_batch(self.batch, self.micro_batches), self.loss)

    def step(self) -> tuple[float, float]:
        """Seconds of the clock and of the processor."""
        clock, processor = time.perf_counter(), time.process_time()
        forward_backward(self.model, self.parts, self.loss)
        update(self.model, self.optimizer, StepSettings())
        return time.perf_counter() - clock, time.process_time() - processor

    def peak(self) -> int:
        return measured_peak(self.step, resident_tensors(self.model, self.optimizer, self.batch))


def serve(connection: Connection, case: str, way: Way, device: Any, threads: int) -> None:
    """The life of a process: two steps, the peak, then a step for each question."""
    torch.set_num_threads(threads)
    try:
        started = time.perf_counter()
        trained = Trained(CASES[case], way, device)
        trained.step()
        first = time.perf_counter() - started
        found: dict[str, Any] = {"peak_bytes": trained.peak(), "until_first_step_seconds": first}
        if trained.plan is not None:
            found["predicted_bytes"] = trained.plan.peak_bytes
        connection.send(found)
    except NotHere as reason:
        connection.send({"empty": str(reason)})
        return
    except CannotFit as error:
        connection.send({"empty": f"no such plan: the least is {error.least_bytes:,} bytes"})
        return
    except Exception as error:
        traceback.print_exc()
        connection.send({"empty": f"{type(error).__name__}: {error}".splitlines()[0][:160]})
        return
    gc.collect()
    while connection.recv():
        connection.send(trained.step())


# In the process that asks


@dataclass(frozen=True)
class Running:
    """A process, and what it found."""

    process: Any
    connection: Connection
    found: dict[str, Any]

    def step(self) -> tuple[float, float]:
        self.connection.send(True)
        return self.connection.recv()


@contextmanager
def running(case: str, way: Way, device: Any, threads: int) -> Iterator[Running]:
    """One way in a process of its own; its `found` has the reason where it does not run."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, case, way, device, threads), daemon=True)
    process.start()
    there.close()
    try:
        try:
            found = here.recv() if here.poll(SECONDS) else {"empty": f"took more than {SECONDS} s"}
        except EOFError:
            process.join()
            found = {"empty": f"the process ended with exit code {process.exitcode}"}
        yield Running(process, here, found)
    finally:
        with suppress(OSError):  # it may have ended already
            here.send(False)
        here.close()
        process.join(LEAVING)
        process.terminate()
        process.join()


def together(case: str, ways: Sequence[Way], rounds: int, device: Any, threads: int) -> dict[str, dict[str, Any]]:
    """The figures of some ways whose processes take turns with the reference."""
    reference = Way(REFERENCE)
    alive: dict[Way, Running] = {}
    figures: dict[str, dict[str, Any]] = {}

    def start(left: Sequence[Way]) -> None:
        if not left:
            for way, row in timed(alive, reference, rounds).items():
                figures[way.name] |= row
            return
        way = left[0]
        with running(case, way, device, threads) as one:
            figures[way.name] = {"ours": way.ours, "source": way.source, "budget_bytes": way.budget, **one.found}
            print(f"{case}: {way.name}: {one.found}", flush=True)
            if "empty" not in one.found:
                alive[way] = one
            start(left[1:])

    start([reference, *(way for way in ways if way != reference)])
    return figures


def timed(alive: Mapping[Way, Running], reference: Way, rounds: int) -> dict[Way, dict[str, float]]:
    """Seconds of steps in turns, in another order each round, and the ratios to the reference within a round."""
    seconds: dict[Way, list[tuple[float, float]]] = {way: [] for way in alive}
    for number in range(rounds):
        for way in list(alive)[:: 1 if number % 2 else -1]:
            seconds[way].append(alive[way].step())
    if not rounds or reference not in alive:
        return {}
    base = seconds[reference]
    return {
        way: {
            "median_seconds": statistics.median(clock for clock, _ in own),
            "least_seconds": min(clock for clock, _ in own),
            "times_as_fast_as_checkpoint": median_ratio(base, own, 0),
            "times_as_fast_by_processor_time": median_ratio(base, own, 1),
        }
        for way, own in seconds.items()
    }


def median_ratio(base: Sequence[tuple[float, float]], own: Sequence[tuple[float, float]], which: int) -> float:
    return statistics.median(b[which] / o[which] for b, o in zip(base, own, strict=True))


def compare(case: str, peers: Sequence[str], levers: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """All ways of one case, in groups that fit the machine."""
    device = made_up() if options.made_up else None
    how = {"rounds": options.rounds, "device": device, "threads": options.threads}
    found = grouped(case, [Way(name) for name in (*peers, *(BY_HAND if levers else ()))], **how)
    against = {name for name in PEERS if any(word in name for word in AGAINST_ACTIVATIONS)}
    peaks = sorted({row["peak_bytes"] for name, row in found.items() if name in against and "peak_bytes" in row})
    plain = found["plain"]["peak_bytes"] if "peak_bytes" in found.get("plain", {}) else None
    budgets = spread([peak for peak in peaks if plain is None or peak < plain], options.budgets)
    plans = [Way(f"plan {kind} at {budget / 2**20:.1f} MiB", kind, budget) for budget in budgets for kind in levers]
    found |= grouped(case, plans, **how)
    return {"case": case, "variants": found}


def spread(peaks: Sequence[int], count: int) -> list[int]:
    """At most so many of some rising peaks, the lowest and the highest among them; none next to another."""
    apart: list[int] = []
    for peak in peaks:
        if not apart or peak > APART * apart[-1]:
            apart.append(peak)
    if len(apart) <= count:
        return apart
    return [apart[round(place * (len(apart) - 1) / max(count - 1, 1))] for place in range(count)]


def grouped(case: str, ways: Sequence[Way], **how: Any) -> dict[str, dict[str, Any]]:
    others = [way for way in ways if way.name != REFERENCE]
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(others), TOGETHER - 1):
        group = together(case, others[first : first + TOGETHER - 1], **how)
        found = {**group, **found}  # the reference of the first group stays
    return found


def made_up() -> Any:
    """Round figures of a CPU, for runs whose seconds do not matter."""
    import importlib
    import sys

    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    return importlib.import_module("made_up_devices").even()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: CPU26")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="PEER", help="default: all")
    parser.add_argument("--levers", nargs="*", choices=LEVERS, default=list(LEVERS), help="of our plans; default: all")
    parser.add_argument(
        "--budgets", type=int, default=4, help="plans at so many of the peaks of peers that save activations"
    )
    parser.add_argument("--rounds", type=int, default=9, help="0: peaks only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--made-up", action="store_true", help="plan with round figures of a CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    where, results = environment(), []
    for case in options.case or ["CPU26"]:
        results.append(compare(case, options.peers, options.levers, options))
        if options.output:
            left_out = [name for name in PEERS if name not in options.peers]
            record = {"environment": where, "rounds": options.rounds, "left_out": left_out, "results": results}
            options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
