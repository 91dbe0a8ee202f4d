"""The public functions `estimate`, `plan` and `curve`: how much memory a step needs, and how it can fit."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch
from torch import nn

from tightfit.errors import CannotFit, InputError
from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.memory.allocator import old_objects_left_alone
from tightfit.memory.process import resident_bytes
from tightfit.planner import host
from tightfit.planner.apply import policy_of
from tightfit.planner.curves import Curve
from tightfit.planner.estimates import (
    Estimate,
    assumption_sentences,
    make_estimate,
    of_communication,
    of_drive,
    of_outcomes,
    of_seconds,
)
from tightfit.planner.levers import (
    CapturedBlocks,
    Combination,
    CompiledBlocks,
    Lever,
    MicroBatches,
    Offload,
    Recompute,
    Stream,
    find,
)
from tightfit.planner.plans import Plan
from tightfit.planner.records import Action, BlockChoice, PlannedProgram
from tightfit.planner.request import OF_THE_STEP, Request, state_bytes
from tightfit.planner.search.candidates import Candidate
from tightfit.planner.search.fastest import Refusal, fastest
from tightfit.planner.search.of_ranks import RanksFound, search_ranks
from tightfit.planner.search.search import Search
from tightfit.planner.search.tradeoff import POINTS, Tradeoff
from tightfit.planner.shared import plan_of_one_rank
from tightfit.planner.step_figures import dtypes_of, fingerprint, step_figures
from tightfit.ranks.peaks import shards_of
from tightfit.ranks.world import Sharding
from tightfit.runtime.internals import process_group_exists
from tightfit.runtime.outside import outside_training
from tightfit.step import Batch, Loss, Optimizer, Precision, Step, TokenBatch
from tightfit.tracing.copies import AWAY
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import real_tensors
from tightfit.units import format_seconds

_OF_A_PLAN = ("levers", "blocks", "offload_folder", "offload_budget", "host_budget", "steps")
TIGHTENED = 4  # how often a plan is made for the host's budget: with each one the process grows a little
LEAST_GAP = 1e-7  # seconds, the last digit printed for microseconds; a smaller gap would be printed as zero


def _request(given: Mapping[str, Any]) -> Request:
    """The request for a function's arguments by name: those of a step, or a `Step` in the place of the model.

    Raises `InputError` where a `Step` and an argument of the step are both given.
    """
    how = {name: value for name, value in given.items() if name in (*OF_THE_STEP, *_OF_A_PLAN)}
    step, batch = how.pop("model"), how.pop("batch")
    if not isinstance(step, Step):
        return Request.of(step, batch, **how)
    if batch is not None:
        raise InputError("batch is given beside a Step, which has it: set it in the Step")
    defaults = {field.name: field.default for field in fields(Step)}
    for name in [each for each in how if each in OF_THE_STEP]:
        if how.pop(name) is not defaults[name]:
            raise InputError(f"{name} is given beside a Step, which has it: set it in the Step")
    return Request.of(**vars(step), **how)


def estimate(
    model: nn.Module | Step,
    batch: Batch = None,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = "fp32",
    device: Any = None,
    micro_batches: int = 1,
    grad_clip: float | None = None,
    keep_gradients: bool | None = None,
    step_in_backward: bool = False,
    world_size: int | None = None,
    nodes: int | None = None,
    parallel: Literal["ddp", "fsdp2", "hsdp", "tp", "cp"] | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> Estimate:
    """Predict the peak memory and the time of one training step, without computing it and without changing the model.

    Your own Python code runs once or more, with tensors without numbers: the model's `forward`, the loss, and hooks on
    modules, parameters and the optimizer. What such code counts or writes is counted and written then too.

    Args:
        model: The module to train, or a `tightfit.Step`, which holds everything that describes the step.
        batch: A dict (passed as keywords), a tuple (positional) or `TokenBatch(size, length, vocab_size)`; with several
            ranks that of one rank.
        loss: `callable(model, batch) -> scalar tensor`. None means `model(**batch).loss`.
        optimizer: A name, an optimizer, or a callable that takes the parameters and returns one.
        precision: `"fp32"`, or autocast to `"bf16"` or `"fp16"`.
        device: None (the one present), a `torch.device`, a name such as `"rtx4090"`, or a name with your own figures:
            `"rtx3080,memory=8GiB"`.
        micro_batches: The number of equal parts of the batch, whose gradients accumulate.
        grad_clip: The norm to which gradients are clipped. None: they are not.
        keep_gradients: The loop sets gradients to zero after a step (`zero_grad(set_to_none=False)`), so the next step
            begins with them. None assumes this if the model has gradients now and all of them are zero.
        step_in_backward: Each weight is updated once its gradient is ready (`tightfit.optim.step_in_backward`), which
            excludes clipping and fp16.
        world_size: The number of ranks that train together, each with `device`. None: one process.
        nodes: The number of machines that the ranks are on (1).
        parallel: `"fsdp2"` (the default of several ranks: each repeated block is sharded by `fully_shard`, then the
            rest, in the mixed precision that `precision` names), `"hsdp"` (FSDP2 within each of `nodes`, each of which
            has a copy of all weights), `"ddp"`, `"tp"` (tensor parallel) or `"cp"` (context parallel: FSDP2 with blocks
            that share each sequence).
        ddp: The arguments that your loop gives to `DistributedDataParallel` beside the model, such as
            `{"gradient_as_bucket_view": True}`. `"no_sync": False` among them says that every micro-batch adds up its
            gradients, and not only the last one.

    Returns:
        The estimate, with bytes as integers and seconds as floats. With several ranks it is that of the rank with the
        highest peak, and has the peaks of all ranks (`rank_peak_bytes`).

    Raises:
        InputError: An argument is wrong.
        TraceError: An operator cannot run dry.

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
    return estimate_asked(_request(locals()))


def plan(
    model: nn.Module | Step,
    batch: Batch = None,
    budget: Any = None,
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
    step_in_backward: bool = False,
    curve: bool = False,
    offload_folder: str | None = None,
    offload_budget: int | str | None = None,
    host_budget: int | str | None = None,
    world_size: int | None = None,
    nodes: int | None = None,
    parallel: Literal["ddp", "fsdp2", "hsdp", "tp", "cp"] | None = None,
    steps: int | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> Plan:
    """Find the fastest combination of levers whose predicted peak is within the budget.

    Args:
        model: The module to train, or a `tightfit.Step`, which holds everything that describes the step.
        batch: As for `tightfit.estimate`. In a process of torchrun it is one of the rank's own batches, of the same
            shape on each rank.
        budget: The largest peak of a step: a number of bytes, `"22GiB"`, `"80%"` of the device, or `"0.5x"` of the
            plain peak. With several ranks it is the peak of each.
        loss: As for `tightfit.estimate`, like `optimizer`, `precision`, `device`, `grad_clip`, `keep_gradients`,
            `step_in_backward`, `nodes` and `ddp`.
        levers: None allows the bit-exact levers. `"rounding"` also allows those that are exact to rounding. A list
            names levers, or one of the two classes and further levers: `["rounding", "offload"]`. `"offload"` and
            `"compile"` are used only if you name them. On cards in FSDP2, `"offload"` means that shards,
            gradients and states may be on the host where nothing else fits; activations stay.
        blocks: A glob over module paths, for models whose repeated blocks tightfit does not find.
        micro_batches: The number of equal parts of the batch. `"auto"` takes the smallest number that has a plan, and
            allows the lever `"micro_batch"`. The effective batch does not change.
        curve: The plan also gets the trade-off curve, and figures for the levers that were not allowed.
        offload_folder: The folder of the file to which a CPU offloads, and of the one that streamed weights are in: on
            a CPU, and on CUDA where `host_budget` has no room for them in memory. None: the system's folder for
            temporary files.
        host_budget: The most bytes of the host's memory that the training may take, this process included, such as
            `"32GiB"`. None: no limit.
        offload_budget: The most bytes that may be offloaded, to that file or from CUDA to pinned host memory. None:
            half of what is free there.
        world_size: The number of ranks; the plan is then one for all of them. `plan.apply(model)` works before or after
            `DistributedDataParallel`. For all others, `plan.shard(model)` divides the model.
        parallel: As for `tightfit.estimate`. With `"tp"` the levers are `"recompute"` and `"micro_batch"`; with `"cp"`
            also `"chunked_loss"`. In a process of torchrun that has called `init_process_group`, `parallel="ddp"` is
            enough: all ranks call `plan` alike, rank 0 makes the plan, and all get it.
        steps: How often the step will run. If that repays the seconds of recording, a plan also uses the exact lever
            `"capture"`, wherever `"recompute"` is allowed. None: so does a plan for a card of which that saves a
            twentieth of each step.

    Returns:
        The plan, with its predicted peak in bytes and its step time in seconds. `plan.apply(model)` puts it in force.

    Raises:
        CannotFit: No plan fits. The error has the least peak that the levers can reach, and ranked ways out
            (`error.ways_out`, found when it is read).
        BudgetError: The budget cannot be parsed.
        LeverError: Offload is named and not available.
        InputError: An argument is wrong.
        TraceError: An operator cannot run dry.

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
    given = locals()
    if isinstance(model, Step) and budget is None:  # `plan(step, budget)`
        given["batch"], budget = None, batch
    request = _request(given)
    return plan_of_one_rank(request, budget, lambda: plan_asked(request, budget, curve=curve))


@outside_training()
@old_objects_left_alone()
@real_tensors()
def curve(
    model: nn.Module | Step,
    batch: Batch = None,
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
    step_in_backward: bool = False,
    points: int = POINTS,
) -> Curve:
    """Predict the trade-off of peak memory against step time, from the plain step down to the least peak.

    Args:
        model: The module to train, or a `tightfit.Step`.
        batch: As for `tightfit.plan`, like all arguments but `points`.
        points: The number of budgets for which a choice is solved and traced as applied.

    Returns:
        The points of the curve (bytes, seconds), the largest peak first, and those of the fixed recipes that people use
        without a plan, such as recomputing every block.

    Raises:
        InputError: An argument is wrong.
        TraceError: An operator cannot run dry.

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
    request = _request(locals()).checked()
    if points < 1:
        raise InputError(f"points is {points}, wanted at least 1")
    search = Search(request, "1x")  # the plain step fits, so the search ends there and only provides traces and prices
    fastest(search)
    return Tradeoff(search).curve(points)


@outside_training()
@old_objects_left_alone()
@real_tensors()
def estimate_asked(asked: Request) -> Estimate:
    """`tightfit.estimate`, with its arguments as one record."""
    request = asked.without_levers().checked()
    return replace(make_estimate(request), host=host.host_of(request))


@outside_training()
@old_objects_left_alone()
@real_tensors()
def plan_asked(asked: Request, budget: int | str, *, curve: bool = False) -> Plan:
    """`tightfit.plan`, with its arguments as one record."""
    request = asked.checked(may_choose=True)
    before = resident_bytes()
    for _ in range(TIGHTENED):
        plan = _planned(request, budget, curve=curve)
        plan = replace(plan, host=host.host_of(request, plan.lever(Stream), before))
        tighter = None if request.host_budget is None else host.within_host(plan, request)
        if tighter is None:
            return plan
        request, budget = tighter
    raise host.host_cannot_fit(plan, request)


def _planned(request: Request, budget: int | str, *, curve: bool) -> Plan:
    if request.world is not None:
        if curve:
            raise InputError("a trade-off curve is of one process, and world_size is given: leave one out")
        try:
            return plan_of_ranks(search_ranks(request, request.world, budget))
        except CannotFit as error:
            if not process_group_exists():  # a rank of a running loop can change neither its engine nor its cards
                error.refusal = Refusal(Search(request, budget))
            raise
    search = Search(request, budget)
    try:
        found = fastest(search)
    except CannotFit as error:
        error.refusal = Refusal(search)
        raise
    if not curve:
        return as_plan(search, found)  # a curve needs further traces
    tradeoff = Tradeoff(search)
    drawn = tradeoff.curve()
    tradeoff.try_forbidden()
    return replace(as_plan(search, found), curve=drawn)


def as_plan(search: Search, candidate: Candidate) -> Plan:
    """The plan for a candidate."""
    request = search.request
    return Plan(
        budget_bytes=search.budget_bytes,
        planned=step_figures(candidate.trace),
        plain=step_figures(search.plain),
        choices=(
            choices := block_choices([*search.paths, *(search.elsewhere if candidate.policies else ())], candidate)
        ),
        # Where numbers decide what runs, a first run of another outcome would bind the choices to its operators.
        programs=()
        if request.has_outcomes(search.plain) and len(request.outcomes) > 1
        else programs_of(candidate, choices),
        levers=levers_of(request, candidate),
        rejected=tuple(search.rejected),
        precision=request.settings.precision,
        optimizer=request.optimizer_name,
        device=request.device.name,
        fingerprint=fingerprint(request.model),
        assumptions=(
            *assumption_sentences(candidate.trace.assumptions),
            *of_outcomes(request, candidate.trace),
            *of_seconds(request.device),
            *of_drive(request, find(candidate.combination.levers, Stream)),
            *not_tried(candidate.combination),
            *not_proved(search.gap_seconds(candidate)),
        ),
        worst_peak_bytes=candidate.worst_bytes,
        batch=describe_batch(request.batch),
        weights=dtypes_of(request.model),
        room=search.room(candidate.trace),
    )


def plan_of_ranks(found: RanksFound) -> Plan:
    """The plan that all ranks of a world share."""
    world, request = found.world, found.search.request
    plan = as_plan(found.search, found.candidate)
    return replace(
        plan,
        budget_bytes=found.budget_bytes,
        plain=step_figures(found.plain),
        assumptions=(*plan.assumptions, *of_communication(request, world)),
        world_size=world.size,
        nodes=world.nodes,
        parallel=world.parallel,
        ddp=tuple(world.ddp.own.items()),
        **({} if not world.is_sharded else as_fields(world.sharding, found.search.tracer.rank(world).blocks)),
        rank_peak_bytes=found.peaks,
        host_bytes=bytes_on_host(request.model, found) if world.sharding.on_host else 0,
        communicator_bytes=request.communicator_bytes,
    )


def as_fields(sharding: Sharding, blocks: Sequence[str]) -> dict[str, Any]:
    """A choice of FSDP2 as a plan's fields, with the blocks that are sharded one by one."""
    return {
        "sharded_blocks": tuple(blocks),
        "reshard_after_forward": sharding.reshard_after_forward is not False,
        "sharded_apart": sharding.apart,
        "reduces_once": sharding.reduces_once,
        "shards_on_host": sharding.on_host,
    }


def bytes_on_host(model: nn.Module, found: RanksFound) -> int:
    """Bytes of the first rank's shards, gradients and states."""
    parameters = list(shards_of(model, found.world, 0).parameters())
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return sum(parameter.nbytes for parameter in parameters) + gradients + state_bytes(found.plain)


def not_proved(gap_seconds: float) -> tuple[str, ...]:
    """A sentence that a faster choice may exist. Nothing if the choice was proved to be the fastest."""
    if not gap_seconds:
        return ()
    most = format_seconds(max(gap_seconds, LEAST_GAP))
    return (f"the choice was not proved to be the fastest: at most {most} a step from it",)


def not_tried(combination: Combination) -> tuple[str, ...]:
    """A sentence that the batch's samples were not computed apart yet. Nothing if they were, or stay together."""
    found = combination.get(MicroBatches)
    if found is None or found.tried:
        return ()
    return (
        "samples can be computed apart: the first backward in micro-batches tries it, as there were no numbers before",
    )


def block_choices(paths: Sequence[str], candidate: Candidate) -> tuple[BlockChoice, ...]:
    """The choice for each block in a candidate."""
    options, modules = {}, {}
    if candidate.priced is not None:
        chain = candidate.priced.chain
        options = {path: chain.options[i][candidate.choice[i]] for i, path in enumerate(candidate.priced.paths)}
        modules = {graph.path: dict(zip(graph.keys, graph.modules, strict=True)) for graph in candidate.priced.graphs}
    choices = []
    # Blocks compiled with a share have no policy inside: the compiler decides what they save.
    compiled, captured = candidate.combination.get(CompiledBlocks), candidate.combination.get(CapturedBlocks)
    shares, fused = ({}, ()) if compiled is None else (dict(compiled.shares), compiled.paths)
    for path in paths:
        policy = candidate.policies.get(path, KEEP_ALL)
        option = options.get(path)
        kept, offloaded = sorted(policy.kept), sorted(policy.offloaded)
        choices.append(
            BlockChoice(
                path=path,
                action=action_of(policy) if (share := shares.get(path)) is None else "compile",
                share=share,
                kept=tuple(map(tuple, kept)),
                kept_modules=tuple(modules[path][key] for key in kept),
                joined=path in candidate.joined,
                kept_bytes=0 if option is None else option.kept_bytes,
                recompute_seconds=0.0 if option is None else option.seconds,
                offloaded=tuple(map(tuple, offloaded)),
                offloaded_modules=tuple(modules[path][key] for key in offloaded),
                offloads_inputs=policy.offloads_inputs,
                captured=captured is not None and path in captured.paths,
                compiled=path in fused,
            )
        )
    assert all(policy_of(c) == candidate.policies.get(c.path, KEEP_ALL) for c in choices), "a choice says its policy"
    return tuple(choices)


def programs_of(candidate: Candidate, choices: Sequence[BlockChoice]) -> tuple[PlannedProgram, ...]:
    """The operators of the blocks whose choice names some."""
    graphs = {} if candidate.priced is None else {graph.path: graph for graph in candidate.priced.graphs}
    paths: dict[tuple[tuple[str, str, int], ...], list[str]] = {}
    for choice in choices:
        graph = graphs.get(choice.path)
        if graph is not None and (choice.kept or choice.offloaded):
            operators = ((key.name, key.operands, size) for key, size in zip(graph.keys, graph.sizes, strict=True))
            paths.setdefault(tuple(operators), []).append(choice.path)
    return tuple(PlannedProgram(tuple(alike), operators) for operators, alike in paths.items())


def action_of(policy: Policy) -> Action:
    """A policy in one word."""
    if policy == KEEP_ALL:
        return "keep"
    if policy.offloads:
        return "offload"
    return "operators" if policy.kept else "recompute"


def levers_of(request: Request, candidate: Candidate) -> tuple[Lever, ...]:
    """The levers that a candidate uses: those of the whole step, then recompute and offload if a block uses them."""
    combination = candidate.combination
    if any(policy != KEEP_ALL and action_of(policy) != "offload" for policy in candidate.policies.values()):
        combination = combination.with_lever(Recompute())
    if any(policy.offloads for policy in candidate.policies.values()):
        combination = combination.with_lever(offload_of(request, candidate.trace))
    return combination.levers


def offload_of(request: Request, trace: StepTrace) -> Offload:
    """The lever offload for a traced step, with the bytes it holds at once: all that one micro-batch copies away.

    None are copied if everything that a policy would offload is smaller than `smallest_bytes`.
    """
    first, last = trace.repeated  # one micro-batch: its backward fetches everything before the next one begins
    copied = sum(o.copied_bytes for o in trace.operators[first:last] if o.name == AWAY)
    settings = request.offload
    folder = None if settings.folder is None else str(settings.folder)
    return Offload(folder, settings.budget_bytes, settings.smallest_bytes, copied, request.device.kind == "cuda")


def describe_batch(batch: Batch) -> str:
    """Names and shapes of a batch's tensors; of tokens that are not made, how many there are."""
    if isinstance(batch, TokenBatch):
        return f"{batch.size:,} x {batch.length:,} tokens"
    named = batch.items() if isinstance(batch, dict) else enumerate(batch)
    shapes = [f"{name} {tuple(value.shape)}" for name, value in named if isinstance(value, torch.Tensor)]
    return ", ".join(shapes)
