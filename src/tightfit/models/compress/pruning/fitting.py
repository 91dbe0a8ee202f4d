"""How much of a model has to go for a training step, or a generation, to fit a budget.

The answer comes from dry runs of pruned shapes, before any weight is touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, InputError
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, Removal, config_after, loads_after, unit_of
from tightfit.models.generation_estimate import estimate_generation
from tightfit.models.pretrained import transformers_package
from tightfit.planner.api import estimate, plan
from tightfit.step import TokenBatch
from tightfit.tracing.build import build_dry
from tightfit.units import format_bytes, parse_budget

# The most that is taken out of each part where nobody says: beyond it little is left to heal. Hidden channels stay:
# they cost the most perplexity for the bytes that they save (docs/compression_results.md).
MOST = Ratios(layers=0.75, ffn=0.75, heads=0.75)


@dataclass(frozen=True)
class Goal:
    """The goal that has to fit: a step with AdamW of `batch_size` rows of `seq_len` tokens, or with `inference` a
    generation of `new_tokens` after such prompts. `device` None: this CPU.
    """

    budget: int | str
    seq_len: int
    batch_size: int = 1
    inference: bool = False
    new_tokens: int = 8
    device: Any = None

    def __post_init__(self):
        for name in ("seq_len", "batch_size", "new_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)} is below 1: give at least 1")

    @property
    def where(self) -> Any:
        return torch.device("cpu") if self.device is None else self.device

    def in_words(self) -> str:
        rows = f"{self.batch_size} x {self.seq_len} tokens"
        return f"inference on {rows} and {self.new_tokens} more" if self.inference else f"a training step on {rows}"


@dataclass(frozen=True)
class Fitting:
    """The smallest removal that fits, its predicted peak, that of the whole model, and the number of dry runs."""

    removal: Removal
    peak_bytes: int
    whole_peak_bytes: int
    budget_bytes: int
    dry_runs: int


def fitting_removal(config: Any, dtype: torch.dtype, anatomy: Anatomy, limits: Ratios, goal: Goal) -> Fitting:
    """The smallest of `removals_up_to(limits)` whose predicted peak is within the budget.

    Each removes at least what the one before does, so their peaks fall, and the smallest is found by bisection. Raises
    `CannotFit` with the peak of the largest, `InputError` for layers that are not alike.
    """
    limits = limits or (replace(MOST, layers=None) if anatomy.is_mixed else MOST)
    if anatomy.is_mixed and limits.layers is not None:
        raise InputError(
            "--to-fit cannot take layers out of a model whose layers differ, before it knows which of them: name other "
            "parts, such as --ffn 0.75"
        )
    removals = [removal for removal in removals_up_to(anatomy, limits) if loads_after(config, anatomy, removal)]
    peaks: dict[int, int] = {}

    def peak(number: int) -> int:
        if number not in peaks:
            peaks[number] = predicted_peak(config_after(config, anatomy, removals[number]), dtype, goal)
        return peaks[number]

    device = lookup(goal.where)
    budget = parse_budget(goal.budget, device_bytes=device.memory_bytes, plain_peak_bytes=peak(0))
    if peak(0) > budget and peak(len(removals) - 1) > budget:
        raise _refused(config_after(config, anatomy, removals[-1]), dtype, goal, budget, peaks[len(removals) - 1])
    found = first_that_fits(len(removals), lambda number: peak(number) <= budget)
    return Fitting(removals[found], peak(found), peak(0), budget, len(peaks))


def first_that_fits(count: int, fits: Callable[[int], bool]) -> int:
    """The first number below `count` that fits, where all after it fit, the last one among them."""
    low, high = 0, count - 1
    if fits(0):
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def removals_up_to(anatomy: Anatomy, limits: Ratios) -> Sequence[Removal]:
    """Removals from nothing up to the limits, each part at the same share of its limit, none smaller than the one
    before in any part.
    """
    most = Removal(
        layers=_most(limits.layers, anatomy.layers, 1),
        ffn=_most(limits.ffn, anatomy.ffn),
        expert_ffn=_most(limits.ffn, anatomy.expert_ffn),
        groups=_most(limits.heads, anatomy.groups, 1),
        hidden=_most(limits.width, anatomy.hidden),
    )
    units = Removal(1, unit_of(anatomy.ffn or 1), unit_of(anatomy.expert_ffn or 1), 1, unit_of(anatomy.hidden))
    steps = max(vars(most)[name] // vars(units)[name] for name in vars(most))
    removals = [
        Removal(**{name: vars(most)[name] * step // steps // unit * unit for name, unit in vars(units).items()})
        for step in range(steps + 1)
    ] if steps else [Removal()]  # fmt: skip
    return list(dict.fromkeys(removals))


def _most(limit: float | None, total: int | None, unit: int = 0) -> int:
    """The largest count within a limit that leaves something."""
    if limit is None or total is None:
        return 0
    unit = unit or unit_of(total)
    return min(int(limit * total), total - 1) // unit * unit


def predicted_peak(config: Any, dtype: torch.dtype, goal: Goal) -> int:
    """The predicted peak of what is to fit, for a model of that shape."""
    model = dry_model(config, dtype)
    batch = TokenBatch(goal.batch_size, goal.seq_len, config.vocab_size)
    if goal.inference:
        ids = batch.tensors()["input_ids"]
        return estimate_generation(model.eval(), ids, new_tokens=goal.new_tokens, device=goal.where).peak_bytes
    return estimate(model.train(), batch, device=goal.where).peak_bytes


def dry_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """A causal language model of `transformers` of that shape, without weights."""
    transformers = transformers_package()

    def made() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.config.use_cache = False
        return model

    return build_dry(made)


def _refused(config: Any, dtype: torch.dtype, goal: Goal, budget: int, least: int) -> CannotFit:
    """The refusal; of a training step with the ways out of the smallest shape, since a plan for it is refused too."""
    refusal = None
    if not goal.inference:
        batch = TokenBatch(goal.batch_size, goal.seq_len, config.vocab_size)
        try:
            plan(dry_model(config, dtype).train(), batch, budget, device=goal.where, levers=[])
        except CannotFit as error:
            # They are ways to train the smallest shape, of which nothing is written: no option of `prune` takes them.
            refusal = error.refusal and replace(error.refusal, taken_by="nothing")
    return CannotFit(
        f"{goal.in_words()} does not fit {format_bytes(budget)}: with the most that may be taken out it needs "
        f"{format_bytes(least)}: raise the shares, name --width too, raise the budget, or lower "
        "--seq-len or --batch-size",
        least,
        refusal=refusal,
    )
