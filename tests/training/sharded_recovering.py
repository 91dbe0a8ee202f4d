"""Small trainings under FSDP2 whose memory runs out at chosen operators, on one rank or several.

As a script that torchrun starts on several ranks: `python sharded_recovering.py FOLDER STRIDE` makes memory run out at
every so many operators, and writes what came out of that to `FOLDER/RANK.json`.
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from recovering import BATCH, LENGTH, VOCABULARY, Awkward, config, plain_fit, planner_of, samples_apart
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from injected_out_of_memory import OutOfMemoryAt
from tightfit.ranks.processes.launch import launched
from tightfit.ranks.processes.ranks import ALONE, Ranks, SeveralRanks
from tightfit.ranks.sent_messages import SentMessages
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.step import StepSettings
from tightfit.training.fitting import Fit, LeversInForce
from tightfit.training.objective import CausalLMLoss, counted, on_device
from tightfit.training.sharded import steps
from tightfit.training.sharded.steps import ShardedStepper
from tightfit.training.sharded.tightening import TighterPlans

BLOCKS, STEPS, FAILING = ["blocks.0", "blocks.1"], 3, (1, 3)


class BetweenMessages:
    """Of a mode that counts operators: what runs inside a message to other ranks is not counted.

    An error in a message is not recovered from.
    """

    def __init__(self, messages: SentMessages, *numbers: int):
        super().__init__(*numbers)
        self._messages = messages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._messages.is_torn:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class OutOfMemoryBetweenMessages(BetweenMessages, OutOfMemoryAt):
    """Memory runs out at operators by their numbers, outside of messages."""

    @property
    def failing(self) -> Sequence[int]:
        """The operators, by their numbers, in which memory can run out."""
        return range(self.count)


class Place(NamedTuple):
    """Where the trainings run, with how many tokens in a row, the share of the plain peak within which they are planned
    tighter, and the mode in which memory runs out there.
    """

    device: str
    length: int
    share: float
    full: Callable[..., Any]

    def batch(self, number: int, rank: int) -> dict[str, Any]:
        """A rank's samples of a step: of unlike numbers of tokens to learn, all ranks' together in the counts."""
        drawn = torch.Generator().manual_seed(100 * number + rank)
        ids = torch.randint(0, VOCABULARY, (BATCH, self.length), generator=drawn)
        labels = ids.clone()
        labels[0, -3 - rank :] = -100
        whole = counted({"input_ids": ids, "labels": labels})
        return {**whole, "valid_tokens": 40, "whole_rows": 2 * BATCH}

    def settings(self, **memory: Any) -> Any:
        return config(training={"device": self.device}, memory=memory)

    def model(self) -> Awkward:
        return Awkward().to(self.device)


CPU = Place("cpu", LENGTH, 0.9, OutOfMemoryBetweenMessages)
batch = CPU.batch


def fits(place: Place = CPU) -> tuple[Fit, Fit, Fit]:
    """The plain step; one that recomputes, bit for bit; one in more micro-batches."""
    plain = plain_fit(place.settings(), place.model(), place.length)
    model, given, within = place.model(), place.batch(1, 0), int(plain.planned.peak_bytes * place.share)
    recomputing = planner_of(model, place.settings()).within(given, within)
    assert recomputing.micro_batches == 1
    assert recomputing.plan is not None
    assert recomputing.plan.levers
    with samples_apart():
        split = planner_of(model, place.settings(levers=["micro_batch"])).within(given, within)
    assert split.micro_batches > 1
    return plain, recomputing, split


@dataclass
class Training:
    """A training of some steps, and what is left of it."""

    stepper: ShardedStepper
    notes: list[str]
    place: Place

    def run(self, around: Callable[[int], Any], before: Mapping[int, Fit] | None = None) -> list[float]:
        """The losses. `around` gives a context for the steps of a training by their numbers; `before` a plan that is
        put in force before a step.
        """
        losses = []
        for number in range(1, STEPS + 1):
            if before and number in before:
                assert self.stepper.plans is not None
                self.stepper.plans.put_in_force(before[number])
                self.stepper.micro_batches = before[number].micro_batches
            given = on_device(self.place.batch(number, self.stepper.ranks.rank), self.stepper.device)
            with around(number):
                losses.append(self.stepper.attempt(given, number).loss)
        return losses

    def everything(self) -> list[torch.Tensor]:
        """This rank's rows of weights and optimizer states, buffers, random states, and what the model remembers."""
        model: Any = self.stepper.model
        states = [v for p in model.parameters() for _, v in sorted(self.stepper.optimizer.state[p].items())]
        numbers = [random.random(), float(numpy.random.rand()), float(torch.rand(())), *model.steps, float(model.seen)]
        numbers.append(float(torch.rand((), device=self.stepper.device)))
        left = [*model.parameters(), *model.buffers(), *states, model.own.get_state()]
        rows = [getattr(tensor, "_local_tensor", tensor) for tensor in left]
        return [t.detach().clone() for t in rows] + [torch.tensor(numbers, dtype=torch.float64)]


def training(
    mesh: Any, given: Sequence[Fit], ranks: Ranks = ALONE, *, recovers: bool = True, place: Place = CPU
) -> Training:
    """A new training on fixed seeds. The first fit is in force, the others are those of tighter plans, in order."""
    first, *tighter = given
    torch.manual_seed(0)
    model: nn.Module = place.model()
    levers = LeversInForce(first, model)
    levers.__enter__()
    in_fsdp2(model, BLOCKS, mesh, first.sharding)
    random.seed(ranks.rank)
    numpy.random.seed(ranks.rank)
    torch.manual_seed(ranks.rank)
    notes: list[str] = []

    def make(bound: int) -> Fit:
        _ = torch.rand(1), random.random(), numpy.random.rand()  # making a plan may draw
        return tighter.pop(0) if len(tighter) > 1 else tighter[0]

    plans = TighterPlans(model, levers, config(), ranks, make) if recovers else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(
        ShardedStepper(
            model, optimizer, CausalLMLoss(), StepSettings("fp32", 0.5), first.micro_batches, ranks=ranks, plans=plans,
            note=notes.append,
        ),
        notes,
        place,
    )  # fmt: skip


class FailingGradients:
    """A context in which forward and backward run out of memory at operators, by the number of their call from 1 on: a
    rank that stands in for itself calls them too. `counts` are the operators of each call, `failing` those of the first
    one in which memory can run out.
    """

    def __init__(self, stepper: ShardedStepper, at: Mapping[int, int], full: Any = OutOfMemoryBetweenMessages):
        self._messages, self._at, self._own, self._full = stepper._messages, at, steps.forward_backward, full
        self.counts: list[int] = []
        self.failing: Sequence[int] = []
        self.raised = 0

    def __enter__(self) -> "FailingGradients":
        steps.forward_backward = self._run
        return self

    def __exit__(self, *exception: Any) -> None:
        steps.forward_backward = self._own

    def _run(self, *arguments: Any, **options: Any) -> Any:
        at = self._at.get(len(self.counts) + 1)
        mode = self._full(self._messages, *([] if at is None else [at]))
        try:
            with mode:
                return self._own(*arguments, **options)
        finally:
            self.failing = self.failing if self.counts else mode.failing
            self.counts.append(mode.count)
            self.raised += mode.raised


def in_step(step: int, failing: Any) -> Callable[[int], Any]:
    return lambda number: failing if number == step else nullcontext()


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def operators(mesh: Any, given: Sequence[Fit], ranks: Ranks, step: int, place: Place = CPU) -> Sequence[int]:
    """Those of forward and backward of a step in which memory can run out, those inside messages left out."""
    run = training(mesh, given, ranks, place=place)
    counted_in = FailingGradients(run.stepper, {}, place.full)
    run.run(in_step(step, counted_in))
    return counted_in.failing


class RanksOfMany(SeveralRanks):
    """Ranks of one training after the other, where a command has one."""

    number = 0

    def demand_same(self, facts: Mapping[str, str]) -> None:
        self.number += 1
        super().demand_same({f"{name} ({self.number})": fact for name, fact in facts.items()})


def main(folder: Path, stride: int, place: Place = CPU) -> None:
    launch = launched()
    assert launch is not None
    with RanksOfMany(launch, timeout_seconds=120, on_cuda=place.device != "cpu") as ranks:
        mesh = init_device_mesh(place.device, (ranks.size,))
        plain, recomputing, split = fits(place)
        found: list[dict[str, Any]] = []

        def expect(given: Sequence[Fit], before: Mapping[int, Fit] | None = None) -> tuple[list[float], list[Any]]:
            run = training(mesh, given, ranks, place=place)
            return run.run(lambda number: nullcontext(), before), run.everything()

        def check(name: str, step: int, at: Mapping[int, int], given: Sequence[Fit], expected: Any) -> None:
            run = training(mesh, given, ranks, place=place)
            failing = FailingGradients(run.stepper, at, place.full)
            losses = run.run(in_step(step, failing))
            is_same = losses == expected[0] and same(run.everything(), expected[1])
            said = {"raised": failing.raised, "failures": run.stepper.corrections.failures, "notes": len(run.notes)}
            found.append({"case": name, "step": step, "at": dict(at), "same": is_same, **said})

        undisturbed = expect([plain, recomputing])
        for step in FAILING:
            whole, in_two = (operators(mesh, [fitted, recomputing], ranks, step, place) for fitted in (plain, split))
            count = len(whole)
            for i in range((7 * step) % stride, count, stride):
                check("one rank", step, {1: whole[i]} if ranks.rank == 1 else {}, [plain, recomputing], undisturbed)
            for i in range((5 * step) % stride, count, 3 * stride):
                at = whole[(i * (1 + 2 * ranks.rank) + 11 * ranks.rank) % count]  # elsewhere on each rank
                half = whole[i] // 2
                check("all ranks", step, {1: at}, [plain, recomputing], undisturbed)
                # As a stand-in, too; then under the tighter plan again.
                check("stand-in", step, {1: at, 2: half} if ranks.rank else {}, [plain, recomputing], undisturbed)
                again = {1: at, 3: half} if ranks.rank else {}
                check("again", step, again, [plain, recomputing, recomputing], undisturbed)
            expected = expect([plain, split], {step: split})
            for number in whole[(3 * step) % stride :: 2 * stride]:
                at = {} if ranks.rank else {1: number}
                check("in micro-batches", step, at, [plain, split], expected)
            expected = expect([split, recomputing], {step: recomputing})
            for number in in_two[(3 * step) % stride :: 2 * stride]:
                at = {1: number} if ranks.rank else {}
                check("in the second micro-batch", step, at, [split, recomputing], expected)
        (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def assert_recovered(folder: Path, ranks: int) -> None:
    """What `main` wrote on each rank: every training went on to the bits of the undisturbed one."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(case["same"] for rank in found for case in rank)
    assert all(case["failures"] == case["notes"] == (2 if case["case"] == "again" else 1) for case in found[0])
    raised = Counter(case["case"] for case in found[1] if case["raised"])
    assert set(raised) >= {"one rank", "all ranks", "stand-in", "again", "in the second micro-batch"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
