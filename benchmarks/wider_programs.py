"""Random programs of kinds that `random_programs.py` has not, under the same promises and under levers by hand.

    python benchmarks/wider_programs.py --sweep             # each piece, form, order, hook, loss by itself
    python benchmarks/wider_programs.py --count 100 [--first SEED] [--fast]

`tests/levers/wider_blocks.py` says what is drawn: state, own autograd, layers, dtypes, writes, forms of a block's call,
orders, hooks, tied and frozen weights, contexts around the blocks. Of each program:

- the estimate is the measured peak, or names an assumption;
- blocks recomputed, half recomputed, captured and offloaded by hand leave the bits of three plain steps, or are
  refused in one line;
- a plan, of levers that are drawn, is within its budget, has its predicted peak, and is verified (without `--fast`).

Prints each program that breaks one of them, with its seed, and the counts.
"""

import argparse
import contextlib
import copy
import gc
import importlib
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from environment import ROOT
from random_programs import SHARES
from tightfit import capture, estimate, offload, plan, recompute, verify
from tightfit.errors import CannotFit, TightfitError
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak, old_objects_left_alone
from tightfit.optim.by_name import build_optimizer
from tightfit.step import StepSettings, forward_backward, update

SAMPLES = 8
WRAPPED = 8  # bytes of a number that Python wraps as a tensor, which autograd may save (`x * 0.1`), and no mode sees
PLANS: dict[str, dict[str, Any]] = {
    "exact": {"levers": "exact"},
    "rounding": {"levers": "rounding"},
    "offload": {"levers": ["exact", "offload"]},
    "captured": {"levers": "exact", "steps": 10**9},
}


def _mean(model: nn.Module, batch: Any) -> Tensor:
    y, left = model(batch["x"])
    return y.square().mean() + left


def _penalty(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"].detach().clone().requires_grad_()
    y, left = model(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean() + left


def _teacher(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        target, _ = model(batch["x"].flip(1))
    y, left = model(batch["x"])
    return (y - target).square().mean() + left


def _two_views(model: nn.Module, batch: Any) -> Tensor:
    (one, left), (other, more) = model(batch["x"]), model(batch["x"] * 0.5)
    return (one - other).square().mean() + left + more + one.square().mean()


def _some_rows(model: nn.Module, batch: Any) -> Tensor:
    y, left = model(batch["x"])
    return (y[batch["kept"]].square().sum(-1) / 8).mean() + left


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "mean": _mean,
    "gradient penalty": _penalty,
    "teacher": _teacher,
    "two views": _two_views,
    "some rows": _some_rows,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"grad_clip": 1.0},
    "gradients kept": {"keep_gradients": True},
    "bf16": {"precision": "bf16"},
}


Take = Callable[[nn.Module, Any], Tensor]  # a loss


def _step(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    value = loss(model, batch)
    value.backward()
    return value


def _evaluated_between(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    model.eval()
    with torch.no_grad():
        model(batch["x"])
    _step(model, batch, loss)
    model.train()
    return _step(model, batch, loss)


def _ragged(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    fewer = {name: value[:5] for name, value in batch.items()}
    for each in (batch, fewer, fewer):
        _step(model, each, loss)
    return _step(model, batch, loss)


def _frozen_later(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    weights = [p for block in list(model.blocks)[:2] for p in block.parameters() if p.requires_grad]
    _step(model, batch, loss)
    for weight in weights:
        weight.requires_grad_(False)
    for _ in range(2):
        _step(model, batch, loss)
    for weight in weights:
        weight.requires_grad_(True)
    return _step(model, batch, loss)


def _double_later(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    model.zero_grad()
    model.double()
    wider = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    _step(model, wider, loss)
    return _step(model, wider, loss)


def _retained(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    value = loss(model, batch)
    value.backward(retain_graph=True)
    value.backward()
    return _step(model, batch, loss)


class Stopped(Exception):
    """Raised amid a step."""


def _stop(*_: Any) -> None:
    raise Stopped


def _interrupted(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    hook = model.blocks[1].out.register_forward_hook(_stop)
    with contextlib.suppress(Stopped):
        _step(model, batch, loss)
    hook.remove()
    _step(model, batch, loss)
    return _step(model, batch, loss)


def _interrupted_in_backward(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    hook = model.blocks[1].out.weight.register_hook(_stop)
    with contextlib.suppress(Stopped):
        _step(model, batch, loss)
    hook.remove()
    model.zero_grad()
    _step(model, batch, loss)
    return _step(model, batch, loss)


def _updated(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        _step(model, batch, loss)
        optimizer.step()
    return _step(model, batch, loss)


def _two_at_once(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    one, other = loss(model, batch), loss(model, batch)
    other.backward()
    one.backward()
    return _step(model, batch, loss)


def _asked(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    weights = [p for p in model.parameters() if p.requires_grad]
    for _ in range(2):
        found = torch.autograd.grad(loss(model, batch), weights, allow_unused=True)
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
    return _step(model, batch, loss)


def _in_a_thread(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    for _ in range(2):
        value = loss(model, batch)
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
    return _step(model, batch, loss)


def _under_autocast(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch)
        value.backward()
    return _step(model, batch, loss)


def _copied(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    twin = copy.deepcopy(model)
    _step(twin, batch, loss)
    _step(model, batch, loss)
    return loss(twin, batch).detach() + _step(model, batch, loss)


def _dropped(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    loss(model, batch)
    with torch.inference_mode():
        model(batch["x"])
    held = loss(model, batch)
    _step(model, batch, loss)
    del held
    return _step(model, batch, loss)


def _loaded(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    before = copy.deepcopy(model.state_dict())
    _step(model, batch, loss)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    _step(model, batch, loss)
    model.load_state_dict(before)
    return _step(model, batch, loss)


def _with_input_gradients(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    _step(model, {**batch, "x": x}, loss)
    _step(model, batch, loss)
    _step(model, {**batch, "x": x}, loss)
    return x.grad.sum()


def _three(model: nn.Module, batch: Any, loss: Take) -> Tensor:
    _step(model, batch, loss)
    _step(model, batch, loss)
    return _step(model, batch, loss)


# What is done with the loss, one step after the other.
SCHEDULES: dict[str, Callable[[nn.Module, Any, Take], Tensor]] = {
    "three": _three,
    "evaluated between": _evaluated_between,
    "ragged": _ragged,
    "frozen later": _frozen_later,
    "double later": _double_later,
    "retained": _retained,
    "interrupted": _interrupted,
    "interrupted in backward": _interrupted_in_backward,
    "updated": _updated,
    "two at once": _two_at_once,
    "asked": _asked,
    "in a thread": _in_a_thread,
    "under autocast": _under_autocast,
    "copied": _copied,
    "dropped": _dropped,
    "loaded": _loaded,
    "with gradients of the input": _with_input_gradients,
}
OPTIMIZERS = ("sgd",) * 4 + ("adamw",)


class Program:
    """A model, a batch, a loss and the settings of its step."""

    def __init__(
        self,
        drawn: Any,
        seed: int,
        loss: str = "mean",
        settings: str = "plain",
        optimizer: str = "sgd",
        schedule: str = "three",
    ):
        torch.manual_seed(seed)
        self.model: nn.Module = helpers().WiderNet(drawn)
        x = torch.randn(SAMPLES, helpers().POSITIONS, helpers().WIDE)
        self.batch = {"x": x, "kept": torch.arange(SAMPLES) % 3 != 1}
        self.loss, self.settings, self.optimizer = LOSSES[loss], SETTINGS[settings], optimizer
        self.unseen = 0  # bytes of numbers that Python wraps, at most
        self.schedule = SCHEDULES[schedule]
        self.text = f"{drawn} | loss {loss}, {settings}, {optimizer}, {schedule}"

    @classmethod
    def of(cls, seed: int) -> "Program":
        draw = random.Random(seed)
        drawn = helpers().Drawn.of(draw)
        loss = draw.choice(list(LOSSES)) if draw.random() < 0.4 else "mean"
        settings = draw.choice(list(SETTINGS)) if draw.random() < 0.4 else "plain"
        schedule = draw.choice(list(SCHEDULES)) if draw.random() < 0.7 else "three"
        return cls(drawn, seed, loss, settings, draw.choice(OPTIMIZERS), schedule)


def helpers() -> Any:
    """The blocks of the tests."""
    return importlib.import_module("wider_blocks")


def by_hand(program: Program) -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    """Levers by hand, by their names."""
    levers = importlib.import_module("trap_levers")
    pattern = "blocks.*"
    yield "recomputed", lambda model: recompute(model, pattern)
    yield "one segment", lambda model: recompute(model, pattern, segments=1)

    def half(model: nn.Module) -> Any:
        paths = levers.matching_modules(model, pattern)
        return levers.apply_policies(model, dict.fromkeys(paths, levers.RandomPolicy(seed=1)))

    yield "half", half
    yield "captured", lambda model: capture(model, pattern)
    yield "captured half", lambda model: capture(model, pattern, policy=levers.RandomPolicy(seed=2))
    yield "offloaded", lambda model: offload(model, pattern)


def unequal(program: Program, count: int, outcomes: Counter[str]) -> Iterator[str]:
    """Which of `count` levers by hand change a bit over the steps of the program's schedule."""
    exactness = importlib.import_module("exactness")
    if program.settings.get("precision"):
        return

    def run(levers: Any) -> Any:
        def steps(model: nn.Module, batch: Any) -> Tensor:
            return program.schedule(model, batch, program.loss)

        model, batch = copy.deepcopy(program.model), copy.deepcopy(program.batch)
        return exactness.run(model, batch, steps, levers=levers, backward=lambda value: None)

    try:
        plain = run(None)
    except Exception as error:
        outcomes["no schedule"] += 1
        outcomes[f"no schedule: {str(error)[:100]}"] += 1
        return
    tried = list(by_hand(program))
    for name, levers in random.Random(program.text).sample(tried, min(count, len(tried))):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                told = exactness.differences(plain, run(levers))
            if told and any("may round differently" in str(warning.message) for warning in caught):
                outcomes[f"{name}: said to round differently"] += 1
                continue
        except TightfitError as error:
            outcomes[f"{name}: refused"] += 1
            outcomes[f"{name} refused: {type(error).__name__}: {str(error)[:300]}"] += 1
            continue
        except Exception:
            yield f"{name}: {traceback.format_exc(limit=-4)}"
            continue
        outcomes[f"{name}: bit-equal"] += not told
        if told:
            yield f"{name}: {told[:3]}"


class Numbers(TorchDispatchMode):
    """Counts operators that take a number of Python's."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += any(isinstance(each, int | float) for each in args[:2])
        return func(*args, **(kwargs or {}))


def measured(model: nn.Module, program: Program, parts: int = 1) -> int:
    """The peak of two steps, of which the allocator saw every tensor that they make."""
    # Of what a first step leaves (gradients that are kept, tensors on modules), a record of the second one alone does
    # not see the end, and would count it beside its successor.
    settings = StepSettings(**program.settings)
    batches = as_parts(split_batch(program.batch, parts), program.loss)
    optimizer = build_optimizer(program.optimizer, model.parameters())

    def steps() -> None:
        for _ in range(2):
            forward_backward(model, batches, program.loss, settings.precision)
            update(model, optimizer, settings)

    tensors = [t for part in batches for t in part.batch.values()]
    return measured_peak(steps, [*model.parameters(), *model.buffers(), *tensors])


def _depends(found: Any) -> bool:
    return any("the peak depends on it" in assumption for assumption in found.assumptions)


def planned(program: Program, name: str, share: float, peak: int, outcomes: Counter[str]) -> Iterator[str]:
    """What a plan breaks."""
    model, batch, loss = program.model, program.batch, program.loss
    step = {"loss": loss, "optimizer": program.optimizer, **program.settings, **PLANS[name]}
    try:
        made = plan(model, batch, f"{share}x", **step)
    except CannotFit as error:
        outcomes[f"{name}: refused"] += 1
        if error.least_bytes >= peak:
            return
        try:
            made = plan(model, batch, error.least_bytes, **step)
        except CannotFit as again:
            yield f"{name}: the least was {error.least_bytes:,}, and is refused: {again}"
            return
    with made.apply(model):
        taken = measured(copy.deepcopy(model), program, made.micro_batches)
    if taken > made.budget_bytes + program.unseen and not _depends(made):
        yield f"{name}: {taken:,} taken of {made.budget_bytes:,} ({made.peak_bytes:,} predicted)"
    elif abs(taken - made.peak_bytes) > program.unseen and not _depends(made):
        yield f"{name}: {taken:,} taken, {made.peak_bytes:,} predicted ({taken - made.peak_bytes:+,})"
    else:
        outcomes[f"{name}: plans to the byte"] += 1
    report = verify(model, batch, made, loss=loss)
    outcomes[f"{name}: verified"] += report.ok
    if not report.ok:
        yield f"{name}: {report}"


def faults(program: Program, names: list[str], share: float, outcomes: Counter[str]) -> Iterator[str]:
    """What of one program breaks a promise. `outcomes` counts what was shown."""
    step = {"loss": program.loss, "optimizer": program.optimizer}
    try:
        with Numbers() as numbers:
            program.loss(copy.deepcopy(program.model), program.batch)
        program.unseen = 64 + WRAPPED * numbers.count
        real = measured(copy.deepcopy(program.model), program)
    except Exception as error:
        outcomes["no program"] += 1
        outcomes[f"no program: {str(error)[:120]}"] += 1
        return
    found = estimate(program.model, program.batch, **step, **program.settings)
    if abs(found.peak_bytes - real) <= program.unseen:
        outcomes["estimates to the byte"] += 1
    elif _depends(found):
        outcomes["estimates with an assumption"] += 1
    else:
        yield f"estimate {found.peak_bytes:,}, measured {real:,} ({real - found.peak_bytes:+,})"
    yield from unequal(program, 6 if len(names) != 1 else 2, outcomes)
    for name in names:
        try:
            yield from planned(program, name, share, found.peak_bytes, outcomes)
        except TightfitError as error:
            outcomes[f"{name}: refused"] += 1
            outcomes[f"{name} refused: {type(error).__name__}: {str(error)[:300]}"] += 1


def checked(text: str, program: Callable[[], Program], names: list[str], share: float, outcomes: Counter[str]) -> bool:
    """True if a program breaks a promise, which is printed."""
    told = []
    try:
        made = program()
        text = f"{text} ({made.text})"
        told = list(faults(made, names, share, outcomes))
    except TightfitError as error:
        outcomes[f"refused: {type(error).__name__}: {str(error)[:300]}"] += 1
    except Exception:
        told.append(traceback.format_exc(limit=-6))
    outcomes["programs"] += 1
    if told:
        print(text, *told, sep="\n  ", flush=True)
    return bool(told)


def swept() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Each piece, form, order, hook, arrangement of weights, context and loss by itself."""
    blocks = helpers()
    usual = (("linear", 0.0, 0.4), ("product", 0.8, 0.0))
    for name in blocks.PIECES:
        yield name, lambda name=name: Program(blocks.Drawn(((name, 0.0, 0.4), (name, 0.8, 0.0))), 0)
    tables = {"form": blocks.FORMS, "order": blocks.ORDERS, "hooks": blocks.HOOKS, "weights": blocks.WEIGHTS}
    for axis, table in {**tables, "around": blocks.AROUND}.items():
        for name in table:
            yield f"{axis} {name}", lambda axis=axis, name=name: Program(blocks.Drawn(usual, **{axis: name}), 0)
    for name in LOSSES:
        yield f"loss {name}", lambda name=name: Program(blocks.Drawn(usual), 0, name)
    for name in SCHEDULES:
        yield f"schedule {name}", lambda name=name: Program(blocks.Drawn(usual), 0, schedule=name)
    for name in SETTINGS:
        yield f"settings {name}", lambda name=name: Program(blocks.Drawn(usual), 0, settings=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="", help="of a sweep, what has this in its name")
    parser.add_argument("--fast", action="store_true", help="no plans")
    options = parser.parse_args()
    sys.path += [str(ROOT / "tests" / "levers"), str(ROOT / "tests")]
    warnings.simplefilter("ignore")
    outcomes, broken = Counter[str](), 0
    list(faults(Program.of(1), list(PLANS), 0.9, Counter()))  # imports, and constants of operators
    gc.collect()
    programs: Iterator[tuple[str, Callable[[], Program]]] = (
        (f"seed {seed}", lambda seed=seed: Program.of(seed))
        for seed in range(options.first, options.first + options.count)
    )
    if options.sweep:
        programs = ((name, made) for name, made in swept() if options.only in name)
    with old_objects_left_alone():
        for number, (text, made) in enumerate(programs, start=1):
            draw = random.Random(-number - options.first)
            names = [] if options.fast else list(PLANS) if options.sweep else draw.sample(list(PLANS), 1)
            broken += checked(text, made, names, draw.choice(SHARES), outcomes)
            if number % 50 == 0:
                kinds = {k: n for k, n in outcomes.items() if "refused: " not in k}
                print(kinds, f"broken: {broken}; {time.process_time():.0f} s of processor time", flush=True)
    for name, count in sorted(outcomes.items()):
        print(f"{count:6} {name}")
    print(f"broken: {broken}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
