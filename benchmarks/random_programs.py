"""Random small programs under every promise: predicted bytes, bit-equal exact levers, bounded or refused rounding.

    python benchmarks/random_programs.py --count 100 [--first SEED]

Each program is drawn from its seed. Its blocks share inputs, weights and results (`tests/levers/random_blocks.py`).
Its input lies in one of several layouts, its loss may couple the samples of a batch, and its forward may run under
switches of its own (autocast, draws of random numbers, another backend, a part without gradients). It may read numbers
that it computes, and end by them. Of each:

- the estimate is the measured peak, but for numbers that Python wraps (64 bytes), or names an assumption; where numbers
  decide what runs, it is not below;
- a plan of exact levers is within its budget, its peak is the predicted one, and it is verified bit-equal;
- a plan that may round is verified within its bound, or is refused.

Prints each program that breaks one of them, with its seed, and the counts.
"""

import argparse
import contextlib
import gc
import importlib
import math
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from environment import ROOT
from tightfit import estimate, plan, verify
from tightfit.errors import CannotFit, ModelError, TightfitError
from tightfit.memory.allocator import old_objects_left_alone

ROWS, LENGTH, WIDTH = 8, 5, 8
WRAPPED = 64  # bytes of numbers that Python wraps, which operators on other layouts allocate
SHARES = (0.95, 0.85, 0.75)
OPTIMIZERS = ("sgd",) * 6 + ("adamw", "adam")  # AdamW's operators are most of a small step's, and the same each time

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "sliced": lambda x: torch.cat([x, x], -1)[..., :WIDTH],
    "every other row": lambda x: torch.cat([x, x])[::2],
}


class Surrounded(nn.Module):
    """A random net whose forward runs under a switch, between a dropout and a head."""

    def __init__(self, net: nn.Module, switch: str, drop: float):
        super().__init__()
        self.net: Any = net
        self.switch = switch
        self.dropout, self.head = nn.Dropout(drop), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        with SWITCHES[self.switch]():
            x = self.dropout(self.head(x))
            if self.switch == "batch statistics":
                x = self.norm(x)
            if self.switch == "noise":
                x = x + 0.1 * torch.randn_like(x)
            if self.switch == "an inner branch without gradients":
                with torch.no_grad():
                    x = x + self.head(x).tanh()
            return self.net.features(x)


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "noise": contextlib.nullcontext,
    "batch statistics": contextlib.nullcontext,
    "an inner branch without gradients": contextlib.nullcontext,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(False),
}


def _pairs(model: nn.Module, x: Tensor) -> Tensor:
    found = F.normalize(model(x).float().flatten(1), dim=-1)
    return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "mean": lambda model, batch: model(batch["x"]).float().square().mean(),
    "sum": lambda model, batch: model(batch["x"]).float().square().sum(),
    "samples weighted": lambda model, batch: (model(batch["x"]).float().flatten(1).mean(1) * batch["weight"]).mean(),
    "pairs in the batch": lambda model, batch: _pairs(model, batch["x"]),
    "centred by the batch": lambda model, batch: (lambda y: (y - y.mean(0)).square().mean())(model(batch["x"]).float()),
    "the largest": lambda model, batch: model(batch["x"]).float().flatten(1).logsumexp(1).max(),
}


# What a forward reads of its numbers. All blocks run; a dry run does not know.
ENDS: dict[str, Callable[[Tensor], bool]] = {
    "reads nothing": lambda x: False,
    "reads nothing of the numbers": lambda x: x.numel() == 0,
    "ends early for a large mean": lambda x: bool(x.detach().float().mean() > 1e9),
    "goes on for a small mean": lambda x: not x.detach().float().mean() < 1e9,
    "goes on for a number": lambda x: x.detach().float().mean().item() * 0 > 0.5,
    "ends for what is not finite": lambda x: not bool(torch.isfinite(x).all()),
}


def random_blocks() -> Any:
    """The random blocks of the tests."""
    sys.path.append(str(ROOT / "tests" / "levers"))
    return importlib.import_module("random_blocks")


def program(seed: int) -> tuple[nn.Module, dict[str, Tensor], Callable[[nn.Module, Any], Tensor], str]:
    """The model, batch and loss of a seed, and their description."""
    blocks, draw = random_blocks(), random.Random(seed)

    class Net(blocks.RandomNet):
        def features(self, x: Tensor) -> Tensor:
            condition, x = self.condition(x), self.begin(x)
            for block in self.blocks:
                if ends(x):
                    break
                for _ in range(self.calls):
                    found = block(x, condition, condition if self.place == "nowhere" else self.learnt)
                    x, second = found if isinstance(found, tuple) else (found, None)
                    x = x if second is None or self.place == "nowhere" else x + second
                if self.place == "between":
                    x = x + 0.1 * condition
            return x

    names = [draw.choice(list(table)) for table in (LAYOUTS, SWITCHES, LOSSES)]
    drop, ends = draw.choice([0.0, 0.0, 0.1]), ENDS[end := draw.choice(list(ENDS))]
    torch.manual_seed(seed)
    model = Surrounded(Net(seed), names[1], drop)
    batch = {"x": LAYOUTS[names[0]](torch.randn(ROWS, LENGTH, WIDTH)), "weight": torch.rand(ROWS)}
    return model, batch, LOSSES[names[2]], f"input {names[0]}, {names[1]}, loss {names[2]}, dropout {drop}, {end}"


def _depends(found: Any) -> bool:
    """True if an assumption says that the peak depends on it."""
    return any("the peak depends on it" in assumption for assumption in found.assumptions)


def _is_decided(found: Any) -> bool:
    """True if numbers decide what runs, and the figures are those of the worst outcome, of finite numbers."""
    told = ("numbers that decide what runs", "whether numbers are finite")
    return any(each in assumption for assumption in found.assumptions for each in told)


def faults(seed: int, allocator_peak: Callable[..., int], outcomes: Counter[str]) -> Iterator[str]:
    """What of one program breaks a promise. `outcomes` counts what was shown."""
    model, batch, loss, _ = program(seed)
    draw = random.Random(-seed)
    optimizer = OPTIMIZERS[draw.choice(range(len(OPTIMIZERS)))]
    found = estimate(model, batch, loss=loss, optimizer=optimizer)
    measured = allocator_peak(model, batch, loss=loss, optimizer=optimizer)
    if abs(found.peak_bytes - measured) <= WRAPPED:
        outcomes["estimates to the byte"] += 1
    elif _depends(found) or (measured < found.peak_bytes and _is_decided(found)):
        outcomes["estimates with an assumption"] += 1
    else:
        yield f"estimate {found.peak_bytes:,}, measured {measured:,}"
    for levers in ("exact", "rounding"):
        try:
            made = plan(model, batch, f"{draw.choice(SHARES)}x", loss=loss, levers=levers, optimizer=optimizer)
        except CannotFit as error:
            outcomes[f"{levers}: refused"] += 1
            if levers == "rounding" or error.least_bytes >= found.peak_bytes:
                continue
            made = plan(model, batch, error.least_bytes, loss=loss, levers=levers, optimizer=optimizer)
        with made.apply(model):
            taken = allocator_peak(model, batch, loss=loss, optimizer=optimizer, micro_batches=made.micro_batches)
        if taken > made.budget_bytes:
            yield f"{levers}: {taken:,} taken of {made.budget_bytes:,}"
        elif (
            abs(taken - made.peak_bytes) > WRAPPED
            and not _depends(made)
            and not (taken < made.peak_bytes and _is_decided(made))
        ):
            yield f"{levers}: {taken:,} taken, {made.peak_bytes:,} predicted"
        else:
            outcomes[f"{levers}: plans to the byte"] += 1
        try:
            report = verify(model, batch, made, loss=loss)
        except ModelError:  # not finite in fp32 alone, so that another branch runs in fp64: nothing to judge by
            outcomes[f"{levers}: another way in fp64"] += 1
            continue
        outcomes[f"{levers}: verified"] += report.ok
        if not report.ok and report.worst is None and math.isnan(report.plain_error or 0.0):
            outcomes[f"{levers}: not finite, as in the plain run"] += 1
        elif not report.ok:
            yield f"{levers}: {report}"


def checked(seed: int, allocator_peak: Callable[..., int], outcomes: Counter[str]) -> bool:
    """True if a program breaks a promise, which is printed."""
    try:
        told = list(faults(seed, allocator_peak, outcomes))
    except TightfitError as error:
        told = [f"refused: {type(error).__name__}: {error}"]
    except Exception:
        told = [traceback.format_exc()]
    outcomes["programs"] += 1
    if told:
        print(f"seed {seed} ({program(seed)[3]}):", *told, sep="\n  ", flush=True)
    return bool(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "tests"))
    allocator_peak = importlib.import_module("tiny").allocator_peak
    warnings.simplefilter("ignore")
    outcomes, broken = Counter[str](), 0
    list(faults(options.first, allocator_peak, Counter()))  # imports, and constants of operators
    gc.collect()
    with old_objects_left_alone():  # a measurement collects garbage first: 0.3 s among the objects of the packages
        for seed in range(options.first, options.first + options.count):
            broken += checked(seed, allocator_peak, outcomes)
            if (seed + 1) % 50 == 0:
                seconds = time.process_time()
                print(dict(outcomes), f"broken: {broken}; {seconds:.0f} s of processor time", flush=True)
    print(dict(outcomes), f"broken: {broken}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
