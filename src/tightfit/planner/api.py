"""The public questions: what will this step take, and how can it fit?"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.apply import policy_of
from tightfit.planner.asked import Asked
from tightfit.planner.curves import Curve
from tightfit.planner.estimates import Estimate, make_estimate, told
from tightfit.planner.levers import CompiledBlocks, Lever, Offload, Recompute
from tightfit.planner.plans import Plan
from tightfit.planner.records import Action, BlockChoice
from tightfit.planner.request import Optimizer, Request
from tightfit.planner.search.candidates import Candidate
from tightfit.planner.search.search import Search
from tightfit.planner.search.tradeoff import POINTS, Tradeoff
from tightfit.planner.step_figures import dtypes_of, fingerprint, step_figures
from tightfit.runtime.activity import aside
from tightfit.step import Batch, Loss, Precision
from tightfit.tracing.copies import AWAY
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import format_seconds

LEAST_GAP = 1e-7  # seconds, the last digit that is shown of microseconds: a smaller gap must not read as none


def estimate(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    device: Any = None,
    micro_batches: int = 1,
    grad_clip: float | None = None,
    keep_gradients: bool | None = None,
) -> Estimate:
    """Predict the peak memory and the time of one training step; nothing is computed and nothing is changed.

    `batch` is a dict (passed as keywords), a tuple (positional) or `TokenBatch(size, length, vocab_size)`; with
    `micro_batches` it is split in as many, whose gradients accumulate. `loss` is `callable(model, batch) ->
    scalar`; without it `model(**batch).loss`. `device` is None (the one present), a `torch.device`, a name, or a name
    with figures of one's own: `"rtx3080,memory=8GiB"`. `keep_gradients` says that the loop sets gradients to zero after
    a step (`zero_grad(set_to_none=False)`), so that the next one begins with them; None: that it does so if the model
    has gradients now and all of them are zero.
    Raises `InputError` for a wrong argument, `TraceError` where an operator cannot be run dry.

    Example:
        >>> import tightfit
        >>> from tightfit.models.decoder import Decoder
        >>> from tightfit.models.decoder_config import DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
        >>> batch = tightfit.TokenBatch(size=8, length=64, vocab_size=64)
        >>> found = tightfit.estimate(model, batch, device="rtx4090")
        >>> found.peak_bytes > 0 and found.fits
        True
    """
    asked = Asked(model, batch, loss, optimizer, precision, device, micro_batches, grad_clip, keep_gradients)
    return estimate_asked(asked)


def plan(
    model: nn.Module,
    batch: Batch,
    budget: int | str,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    device: Any = None,
    levers: str | Sequence[str] | None = None,
    blocks: str | None = None,
    micro_batches: int | Literal["auto"] = 1,
    grad_clip: float | None = None,
    keep_gradients: bool | None = None,
    curve: bool = False,
    offload_folder: str | None = None,
    offload_budget: int | str | None = None,
) -> Plan:
    """The fastest combination of levers whose true peak is within the budget.

    `budget` is in bytes: an int, `"22GiB"`, `"80%"` of the device, `"0.5x"` of the plain peak. `levers` None allows
    those that are bit-exact, `"rounding"` also those that are exact to rounding, a list names them, or one of these
    and more: `["rounding", "offload"]`. `blocks` is a
    glob over module paths where the repeated blocks are not to be found by themselves. The other arguments are
    those of `estimate`; `micro_batches="auto"` takes the largest micro-batch that fits: the fewest equal parts of the
    batch for which there is a plan, so that the effective batch stays what it is (and the lever `"micro_batch"` is
    allowed by that). The lever `"offload"` is used only where it is named: from a CPU to a file in `offload_folder`
    (None: the system's for temporary files), from CUDA to pinned host memory, of at most `offload_budget` (None: half
    of what is free there). So is `"compile"`, on a CPU: blocks as `torch.compile` makes them. With
    `curve` the plan carries the trade-off curve too, and what the levers that were not allowed would have given.
    Raises `CannotFit` with the least peak that can be reached, `BudgetError` where the budget cannot be read,
    `LeverError` where offload is named and not available.

    Example:
        >>> import tightfit, torch
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> def loss(model, batch):
        ...     return model(*batch).square().mean()
        >>> batch = (torch.randn(512, 16),)
        >>> plan = tightfit.plan(model, batch, "0.8x", loss=loss)
        >>> plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
        True
        >>> with plan.apply(model):  # while it lasts, your own loop trains within the budget
        ...     loss(model, batch).backward()
    """
    asked = Asked(
        model, batch, loss, optimizer, precision, device, micro_batches, grad_clip, keep_gradients,
        levers, blocks, offload_folder, offload_budget,
    )  # fmt: skip
    return plan_asked(asked, budget, curve=curve)


@aside()
@real_tensors()
def curve(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    device: Any = None,
    levers: str | Sequence[str] | None = None,
    blocks: str | None = None,
    micro_batches: int = 1,
    grad_clip: float | None = None,
    keep_gradients: bool | None = None,
    points: int = POINTS,
) -> Curve:
    """What memory costs in time: peak against step time, from the plain step down to the least peak.

    `points` is the number of budgets for which a choice is solved and traced as applied. The other arguments are those
    of `plan`. The curve also holds the fixed recipes that are used without a plan.

    Example:
        >>> import tightfit, torch
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> def loss(model, batch):
        ...     return model(*batch).square().mean()
        >>> batch = (torch.randn(512, 16),)
        >>> curve = tightfit.curve(model, batch, loss=loss, points=3)
        >>> peaks = [point.peak_bytes for point in curve.points]
        >>> peaks == sorted(peaks, reverse=True)
        True
    """
    asked = Asked(
        model, batch, loss, optimizer, precision, device, micro_batches, grad_clip, keep_gradients, levers, blocks
    )
    request = asked.request()
    if points < 1:
        raise InputError(f"points is {points}, wanted at least 1")
    search = Search(request, "1x")
    search.run()
    return Tradeoff(search).curve(points)


@aside()
@real_tensors()
def estimate_asked(asked: Asked) -> Estimate:
    """`tightfit.estimate`, of what was asked."""
    return make_estimate(asked.without_levers().request())


@aside()
@real_tensors()
def plan_asked(asked: Asked, budget: int | str, *, curve: bool = False) -> Plan:
    """`tightfit.plan`, of what was asked."""
    search = Search(asked.request(may_choose=True), budget)
    found = search.run()
    if not curve:
        return as_plan(search, found)
    tradeoff = Tradeoff(search)
    drawn = tradeoff.curve()
    tradeoff.try_forbidden()
    return replace(as_plan(search, found), curve=drawn)


def as_plan(search: Search, candidate: Candidate) -> Plan:
    """A found candidate as the record the user gets."""
    request = search.request
    return Plan(
        budget_bytes=search.budget_bytes,
        planned=step_figures(candidate.trace),
        plain=step_figures(search.plain),
        choices=block_choices(search.paths, candidate),
        levers=levers_of(request, candidate),
        rejected=tuple(search.rejected),
        precision=request.settings.precision,
        optimizer=request.optimizer_name,
        device=request.device.name,
        fingerprint=fingerprint(request.model),
        assumptions=(*told(candidate.trace.assumptions), *not_proved(search.gap_seconds(candidate))),
        worst_peak_bytes=candidate.worst_bytes,
        batch=describe_batch(request.batch),
        weights=dtypes_of(request.model),
        room=search.room(candidate.trace),
    )


def not_proved(gap_seconds: float) -> tuple[str, ...]:
    """That a faster choice may exist, in a sentence; nothing where the choice was proved to be the fastest."""
    if not gap_seconds:
        return ()
    most = format_seconds(max(gap_seconds, LEAST_GAP))
    return (f"the choice was not proved to be the fastest: at most {most} a step from it",)


def block_choices(paths: Sequence[str], candidate: Candidate) -> tuple[BlockChoice, ...]:
    """What each block does under a candidate."""
    options, modules = {}, {}
    if candidate.priced is not None:
        chain = candidate.priced.chain
        options = {path: chain.options[i][candidate.choice[i]] for i, path in enumerate(candidate.priced.paths)}
        modules = {graph.path: dict(zip(graph.keys, graph.modules, strict=True)) for graph in candidate.priced.graphs}
    choices = []
    compiled = candidate.combination.get(CompiledBlocks)
    for path in paths:
        policy = candidate.policies.get(path, KEEP_ALL)
        option = options.get(path)
        kept, offloaded = sorted(policy.kept), sorted(policy.offloaded)
        choices.append(
            BlockChoice(
                path=path,
                action=action_of(policy) if compiled is None else "compile",
                share=None if compiled is None else compiled.share_of(path),
                kept=tuple((key.name, key.occurrence) for key in kept),
                kept_modules=tuple(modules[path][key] for key in kept),
                joined=path in candidate.joined,
                kept_bytes=0 if option is None else option.kept_bytes,
                recompute_seconds=0.0 if option is None else option.seconds,
                offloaded=tuple((key.name, key.occurrence) for key in offloaded),
                offloaded_modules=tuple(modules[path][key] for key in offloaded),
                offloads_inputs=policy.offloads_inputs,
            )
        )
    assert all(policy_of(c) == candidate.policies.get(c.path, KEEP_ALL) for c in choices), "a choice says its policy"
    return tuple(choices)


def action_of(policy: Policy) -> Action:
    """A policy in one word."""
    if policy == KEEP_ALL:
        return "keep"
    if policy.offloads:
        return "offload"
    return "operators" if policy.kept else "recompute"


def levers_of(request: Request, candidate: Candidate) -> tuple[Lever, ...]:
    """The levers that a candidate uses: those of the whole step, and those that are at work inside its blocks."""
    combination = candidate.combination
    if any(policy != KEEP_ALL and action_of(policy) != "offload" for policy in candidate.policies.values()):
        combination = combination.with_lever(Recompute())
    return combination.with_lever(offload_of(request, candidate.trace)).levers


def offload_of(request: Request, trace: StepTrace) -> Offload | None:
    """Where a traced step offloads to, and how much at once: all that a micro-batch's forward copies away."""
    first, last = trace.repeated
    copied = sum(o.copied_bytes for o in trace.operators[first:last] if o.name == AWAY)
    if not copied:
        return None
    settings = request.offload
    folder = None if settings.folder is None else str(settings.folder)
    return Offload(folder, settings.budget_bytes, settings.smallest_bytes, copied, request.device.kind == "cuda")


def describe_batch(batch: Batch) -> str:
    """Names and shapes of a batch's tensors."""
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return f"{type(batch).__name__}{tuple(batch)}"
    named = batch.items() if isinstance(batch, dict) else enumerate(batch)
    shapes = [f"{name} {tuple(value.shape)}" for name, value in named if isinstance(value, torch.Tensor)]
    return ", ".join(shapes)
