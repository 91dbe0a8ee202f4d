"""A rank's peak in DDP, FSDP2, HSDP, tensor and context parallel: predicted, against real processes that talk by gloo.

Each real process counts its allocations by `allocations.c`, which is preloaded: PyTorch's CPU allocator to the byte, in
every thread, and all other large allocations by themselves. PyTorch's profiler, with which other benchmarks measure a
CPU, records the threads in which it was started, and gloo frees copies in threads of its own. Each process takes seven
steps. The first ones make states and buckets. Of the others the least peak is compared: gloo's thread may free a copy
after the call that needed it has returned, so single peaks are higher by up to one copy. The results have these too. A
file of results that is there already is gone on with: each row has the number of its environment.

    python benchmarks/ranks.py [--output results.json] [--only fsdp2]
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tightfit
from environment import environment
from tightfit import Plan
from tightfit.levers.micro_batch import as_parts, as_tensors, split_batch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.blocks.find import find_blocks
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.messages import MESSAGES
from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.ranks.world import SHARDED, DDPSettings, Parallel, Sharding, World
from tightfit.ranks.wrapping import in_ddp, in_fsdp2, mesh_of, modules_apart
from tightfit.step import Precision, StepSettings, TokenBatch, forward_backward, model_loss, update
from tightfit.tracing.step import trace_step

HERE = Path(__file__).resolve().parent
STEPS, WARM = 15, 3  # gloo frees late, in some steps and ranks more often than in others: the least of many counts
EVEN, UNEVEN = (64, 4, 256), (90, 5, 257)  # hidden size, heads, vocabulary


@dataclass(frozen=True)
class Case:
    """A model, and how processes train it together."""

    world_size: int
    parallel: Parallel
    precision: Precision = "fp32"
    reshard: bool | None = None
    micro_batches: int = 1
    grad_clip: float | None = None
    shape: tuple[int, int, int] = EVEN
    recompute: bool = False  # every block, by PyTorch's own checkpoint
    budget: str | None = None  # of a plan for all ranks, which is applied before the model is wrapped
    ddp: tuple[tuple[str, Any], ...] = ()  # arguments of DistributedDataParallel, and the loop's no_sync
    apart: bool = False  # embedding and head are sharded by themselves
    once: bool = False  # gradients are exchanged in the last of several micro-batches
    nodes: int = 1

    def model(self) -> Decoder:
        hidden, heads, vocabulary = self.shape
        torch.manual_seed(0)
        config = DecoderConfig(
            hidden_size=hidden, num_layers=4, num_heads=heads, vocab_size=vocabulary, tie_embeddings=not self.apart
        )
        model = Decoder(config)
        for number, layer in enumerate(model.layers):
            model.layers[number] = checkpoint_wrapper(layer) if self.recompute else layer
        return model

    def batch(self) -> Any:
        return as_tensors(TokenBatch(4, 32, self.shape[2]))

    def parts(self, plan: Plan | None = None) -> list[Any]:
        count = self.micro_batches if plan is None else plan.micro_batches
        return as_parts(split_batch(self.batch(), count), model_loss)

    def sharding(self, model: Decoder) -> Sharding:
        apart = modules_apart(model, find_blocks(model)) if self.apart else ()
        return Sharding(self.reshard, apart, self.once)

    @property
    def settings(self) -> StepSettings:
        # FSDP2 casts weights and activations itself, so autocast has nothing to do.
        return StepSettings("fp32" if self.parallel in SHARDED else self.precision, self.grad_clip)

    def world(self, sharding: Sharding | None = None) -> World:
        return World(self.world_size, self.parallel, self.nodes, sharding or Sharding(), DDPSettings.of(dict(self.ddp)))


@cache
def planned(case: Case) -> Plan | None:
    """The plan for a case's budget, made for a CPU with made-up figures; None without a budget."""
    if case.budget is None:
        return None
    sys.path.append(str(HERE.parent / "tests"))
    return tightfit.plan(
        case.model(),
        case.batch(),
        case.budget,
        device=importlib.import_module("made_up_devices").even(),
        levers="rounding",
        precision=case.precision,
        grad_clip=case.grad_clip,
        world_size=case.world_size,
        parallel=case.parallel,
        nodes=case.nodes,
        ddp=dict(case.ddp) if case.ddp else None,
    )


VIEWS = ("gradient_as_bucket_view", True)
CASES = [
    Case(2, "fsdp2", recompute=True, shape=UNEVEN),
    Case(2, "fsdp2", "bf16", recompute=True, shape=UNEVEN),
    Case(2, "fsdp2", grad_clip=1.0, shape=UNEVEN),
    Case(2, "fsdp2", micro_batches=2, shape=UNEVEN),
    *(Case(2, "fsdp2", precision, shape=UNEVEN, apart=True) for precision in ("fp32", "bf16")),
    Case(4, "fsdp2", reshard=False, shape=UNEVEN, apart=True),
    *(Case(2, "fsdp2", precision, None, 3, shape=UNEVEN, once=True) for precision in ("fp32", "bf16")),
    Case(2, "fsdp2", reshard=False, micro_batches=2, shape=UNEVEN, apart=True, once=True),
    Case(2, "fsdp2", recompute=True, shape=UNEVEN, apart=True),
    Case(2, "ddp", grad_clip=1.0, micro_batches=2, shape=UNEVEN),
    *(Case(2, "fsdp2", shape=UNEVEN, budget=budget) for budget in ("0.85x", "0.7x")),
    Case(2, "fsdp2", "bf16", shape=UNEVEN, budget="0.85x"),
    Case(2, "ddp", shape=UNEVEN, budget="0.85x"),
    *(
        Case(2, "ddp", grad_clip=1.0, micro_batches=count, shape=UNEVEN, budget=budget, ddp=settings)
        for settings, count, budget in [
            ((VIEWS,), 1, None),
            ((VIEWS,), 3, None),
            ((), 3, None),
            ((("no_sync", False),), 3, None),
            ((VIEWS, ("no_sync", False)), 3, None),
            ((("bucket_cap_mb", 0.1),), 1, None),
            ((("broadcast_buffers", False),), 1, None),
            ((("find_unused_parameters", True),), 1, None),
            ((("static_graph", True),), 1, None),
            ((VIEWS, ("static_graph", True)), 1, None),
            ((VIEWS,), 1, "0.85x"),
            ((VIEWS,), 1, "0.75x"),
            ((("find_unused_parameters", True),), 1, "0.8x"),
            ((("static_graph", True),), 1, "0.85x"),
        ]
    ),
    *(
        Case(size, "tp", precision, micro_batches=count, recompute=recompute)
        for size in (2, 4)
        for precision, count, recompute in [("fp32", 1, False), ("bf16", 1, False), ("fp32", 2, True)]
    ),
    *(Case(4, "hsdp", precision, shape=UNEVEN, nodes=2) for precision in ("fp32", "bf16")),
    Case(4, "hsdp", reshard=False, grad_clip=1.0, shape=UNEVEN, apart=True, nodes=2),
    Case(4, "hsdp", "bf16", micro_batches=3, shape=UNEVEN, once=True, nodes=2),
    Case(4, "hsdp", micro_batches=2, shape=UNEVEN, nodes=2),
    Case(4, "hsdp", shape=UNEVEN, budget="0.85x", nodes=2),
    Case(6, "hsdp", shape=UNEVEN, nodes=2),
    *(Case(size, "cp", precision, shape=UNEVEN) for size in (2, 4) for precision in ("fp32", "bf16")),
    Case(2, "cp", reshard=False, micro_batches=2, grad_clip=1.0, shape=UNEVEN),
    Case(2, "cp", shape=UNEVEN, budget="0.88x"),
    Case(2, "cp", "bf16", shape=UNEVEN, budget="0.92x"),
] + [
    Case(size, parallel, precision, reshard, shape=shape)
    for size in (2, 4)
    for parallel, reshards in (("ddp", [None]), ("fsdp2", [None, False]))
    for reshard in reshards
    for precision in ("fp32", "bf16")
    for shape in ((EVEN, UNEVEN) if size == 2 and reshard is None else (UNEVEN,))
]


def predicted(case: Case, rank: int) -> dict[str, Any]:
    """The peak of a rank, of all and without gloo's copies."""
    plan = planned(case)
    if plan is not None:
        return {"predicted_bytes": plan.rank_peak_bytes[rank], "planned_levers": [str(lever) for lever in plan.levers]}
    model = case.model()
    world = case.world(case.sharding(model) if case.parallel in SHARDED else None)
    played = SimulatedRank(world, rank, find_blocks(model), case.precision)
    trace = trace_step(own_copy(model), case.parts(), model_loss, settings=case.settings, rank=played)
    without = (
        level - operator.workspace_bytes * operator.name.startswith(MESSAGES)
        for level, operator in zip(trace.levels, trace.operators, strict=True)
    )
    return {"predicted_bytes": trace.peak_bytes, "without_gloo_bytes": max(without)}


def measured(case: Case, library: Path) -> list[dict[str, int]]:
    """What each real process counted."""
    with tempfile.TemporaryDirectory() as folder:
        here = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case))]
        plan = planned(case)
        if plan is not None:
            plan.to_json(f"{folder}/plan.json")
        setting = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*here, str(rank), folder], env=setting, stdout=subprocess.PIPE, text=True)
            for rank in range(case.world_size)
        ]
        written = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "a process failed: its own message is above"
    return [json.loads(text.splitlines()[-1]) for text in written]


def work(case: Case, rank: int, folder: str) -> None:
    """One real process: a few steps, and a line of JSON."""
    plan = None if case.budget is None else Plan.from_json(f"{folder}/plan.json")
    counts = Counts()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.world_size)
    dist.barrier()
    gc.collect()
    before = counts.live
    model = case.model()
    if plan is not None:
        plan.apply(model)
    if case.parallel == "ddp":
        held = in_ddp(model, DDPSettings.of(dict(case.ddp)))
    elif case.parallel == "tp":
        held = in_tensor_parallel(model, mesh_of(case.world(), "cpu"))
    else:
        mesh = mesh_of(case.world(), "cpu")
        sharding = case.sharding(model)
        if plan is not None:
            held = plan.shard(model, mesh)
        else:
            engine = in_context_parallel if case.parallel == "cp" else in_fsdp2
            held = engine(model, find_blocks(model), mesh, sharding, precision=case.precision)
    parts = case.parts(plan)
    optimizer = build_optimizer("adamw", held.parameters())
    gc.collect()  # the first import of a part of PyTorch leaves cycles that hold the whole weights of one block
    gc.disable()
    peaks, others = [], []
    for _ in range(STEPS):
        dist.barrier()
        time.sleep(0.1)  # gloo's threads let go of what they hold
        counts.reset()
        other = counts.other
        step(held, parts, optimizer, case.settings)
        peaks.append(counts.peak - before)
        others.append(counts.other_peak - other)
    print(json.dumps({"peaks": peaks[WARM:], "other_bytes": max(others[WARM:])}), flush=True)
    dist.barrier()  # none closes connections that another one still uses
    dist.destroy_process_group()


def step(model: torch.nn.Module, parts: list[Any], optimizer: Any, settings: StepSettings) -> None:
    forward_backward(model, parts, model_loss, settings.precision)
    update(model, optimizer, settings)


class Counts:
    """The counts of `allocations.c` in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.allocations.restype = ctypes.c_long
        mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "libc10.so" in line]
        ends = [int(end, 16) for span in mapped for end in span.split("-")]
        self._library.is_of_allocator(ctypes.c_ulong(min(ends)), ctypes.c_ulong(max(ends)))

    def reset(self) -> None:
        self._library.reset()

    @property
    def live(self) -> int:
        return self._library.allocations(0)

    @property
    def peak(self) -> int:
        return self._library.allocations(1)

    @property
    def other(self) -> int:
        return self._library.allocations(2)

    @property
    def other_peak(self) -> int:
        return self._library.allocations(3)


def compare(case: Case, library: Path) -> list[dict[str, Any]]:
    """A row for each rank."""
    rows = []
    for rank, counted in enumerate(measured(case, library)):
        made = predicted(case, rank)
        least, most = min(counted["peaks"]), max(counted["peaks"])
        rows.append(
            {**asdict(case), "rank": rank, **made, "measured_bytes": least, "highest_bytes": most}
            | {"outside_bytes": counted["other_bytes"], "difference": made["predicted_bytes"] - least}
        )
        print(
            f"{case.parallel} x{case.world_size} {case.precision} reshard={case.reshard} {case.shape} rank {rank}, "
            f"recompute={case.recompute}, budget {case.budget}, {case.micro_batches} micro-batches, "
            f"clip {case.grad_clip}, {dict(case.ddp)}, apart={case.apart}, once={case.once}: "
            f"predicted {made['predicted_bytes']:,}, "
            f"measured {least:,} ({rows[-1]['difference']:+,}; up to {most:,})",
            flush=True,
        )
    return rows


def built(folder: str) -> Path:
    """The counter, compiled."""
    library = Path(folder) / "allocations.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", str(library), str(HERE / "allocations.c"), "-ldl", "-lpthread"],
        check=True,
    )
    return library


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--worker"]:
        described = json.loads(arguments[1])
        settings = tuple((name, value) for name, value in described["ddp"])
        case = Case(**{**described, "shape": tuple(described["shape"]), "ddp": settings})
        work(case, int(arguments[2]), arguments[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=get_args(Parallel))
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--planned", action="store_true", help="only the cases with a plan")
    parser.add_argument("--settings", action="store_true", help="only the cases with settings of DDP")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.only in (None, case.parallel)]
    cases = [case for case in cases if options.world_size in (None, case.world_size)]
    cases = [case for case in cases if case.budget is not None or not options.planned]
    cases = [case for case in cases if case.ddp or not options.settings]
    here = environment()
    with tempfile.TemporaryDirectory() as folder:
        library = built(folder)
        is_gone_on_with = options.output is not None and options.output.exists()
        before = (
            json.loads(options.output.read_text("utf-8")) if is_gone_on_with else {"environments": [], "results": []}
        )
        environments, rows = [*before["environments"], here], before["results"]
        done = [{name: row.get(name, value) for name, value in asdict(CASES[0]).items()} for row in rows]
        for case in cases:
            if json.loads(json.dumps(asdict(case))) in done:
                continue
            rows += ({**row, "environment": len(before["environments"])} for row in compare(case, library))
            if options.output is not None:
                content = {"environments": environments, "results": rows}
                options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
