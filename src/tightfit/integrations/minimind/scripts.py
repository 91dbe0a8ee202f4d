"""Runs MiniMind's own trainer scripts (github.com/jingyaogong/minimind), unmodified, with memory flags.

Under torchrun a script puts its model into DDP, and rank 0 plans for all.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.errors import InputError, LeverError, ModelError, TightfitError
from tightfit.integrations.checkpointing import COMPILED, wrapper_of
from tightfit.integrations.minimind.running_step import running_request
from tightfit.integrations.model_ranks import ranks_of_model
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.api import as_plan, plan_of_ranks
from tightfit.planner.apply import AppliedPlan
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import CompiledBlocks
from tightfit.planner.plans import Plan
from tightfit.planner.request import Request
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.of_ranks import RanksFound, search_ranks
from tightfit.planner.search.search import Search
from tightfit.planner.wrapped import is_distributed
from tightfit.runtime.module_paths import without_ddp
from tightfit.training.monitoring.record import Record
from tightfit.training.monitoring.script import PreparedScript, profile_script
from tightfit.units import check_budget

# PyTorch's, of modules that are called while the script's model is looked for. The hooks do what they are meant to.
_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"

WHO = "tightfit minimind"
MODEL_FILE = Path("model") / "model_minimind.py"
FEED_FORWARD = ("mlp", "ffn", "feed_forward")  # names of feed-forwards in blocks; MiniMind's is mlp


@dataclass(frozen=True)
class MemoryFlags:
    """The user's flags: recompute by a rule (`use_checkpoint`), or a plan for a budget.

    `segments` joins the blocks to that many runs of neighbours. `ffn_only` recomputes only the feed-forward of each
    block. Raises `InputError` for flags that exclude each other, and `BudgetError` for an invalid budget.
    """

    use_checkpoint: bool = False
    memory_budget: str | None = None
    segments: int | None = None
    ffn_only: bool = False

    def __post_init__(self) -> None:
        if self.use_checkpoint == (self.memory_budget is not None):
            both = "exclude each other" if self.use_checkpoint else "are both missing"
            raise InputError(f"--use_checkpoint and --memory_budget {both}: give one of them")
        if self.memory_budget is not None:
            check_budget(self.memory_budget)
        if self.segments is not None and self.memory_budget is not None:
            raise InputError("--segments goes with --use_checkpoint: for a --memory_budget the plan chooses them")
        if self.segments is not None and self.ffn_only:
            raise InputError("--segments joins whole blocks and --ffn_only takes a part of each: give one of them")
        if self.segments is not None and self.segments < 1:
            raise InputError(f"--segments {self.segments} is less than 1")


@dataclass(frozen=True)
class MiniMindRun:
    """The result of a script: its plan, the monitor's record, and the exception that ended it, if any.

    The plan is None if the script ended before it trained anything. `compiles` says that the script compiles its model,
    so the plan was free to compile blocks.
    """

    plan: Plan | None
    record: Record
    error: BaseException | None
    compiles: bool = False


def run_minimind(script: Path, arguments: Sequence[str], flags: MemoryFlags) -> MiniMindRun:
    """Run a trainer script of a MiniMind checkout as `python SCRIPT ARGUMENTS` would, in this process, under a plan.

    The plan is made in the model's first call, for the batch and the loss of the script's own step, before anything is
    computed. Exceptions of the script itself are returned.

    Args:
        script: The path of the script in its checkout.
        arguments: The script's own arguments.
        flags: Recompute by a rule, or a plan for a budget.

    Returns:
        The plan, the monitor's record, and the exception that ended the script, if any.

    Raises:
        InputError: The script is not MiniMind's.
        ModelError: Its model cannot be planned, or it trains none.
        CannotFit: The budget is below the least peak.
    """
    check_script(script)
    planner = _Planner(flags)
    with planner.compiling.active():
        run = profile_script(script, arguments, prepare=planner)
    planner.undo()
    if planner.refusal is not None:
        raise planner.refusal
    if planner.plan is None and run.error is None:
        raise ModelError(f"{script}: it ended without having trained a model in this process")
    return MiniMindRun(planner.plan, run.watch.record(), run.error, planner.compiles)


def check_script(script: Path) -> None:
    """Raise `InputError` unless this is a script in a checkout of MiniMind."""
    if not script.is_file():
        raise InputError(f"{script}: no such script")
    folders = script.resolve().parents
    if not any((folder / MODEL_FILE).is_file() for folder in folders[:2]):
        raise InputError(
            f"{script}: not a script of a MiniMind checkout (there is no {MODEL_FILE} beside its folder): "
            "for a loop of your own see docs/guests/plain_loops.md"
        )


class TakenOverCompile:
    """The models that a script compiles whole while `active()` lasts: the plan compiles their blocks instead. Mutable.

    PyTorch decides what a model that is compiled whole keeps for backward, and a dry run cannot ask it. So the object
    that `torch.compile` returns stays as it is, with its names and its state, and calls the model that it is around.
    """

    def __init__(self) -> None:
        self._taken: list[nn.Module] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which `torch.compile(model)` leaves the compiling to a plan. `end()` may end it before."""
        self._own = torch.compile
        torch.compile = self._compile
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=_OF_HOOKS)
                yield
        finally:
            self.end()

    def end(self) -> None:
        """From now on `torch.compile` compiles, as levers need it."""
        torch.compile = self._own

    def under(self, model: nn.Module) -> nn.Module | None:
        """The model that a wrapper of `torch.compile` is around; None for a model that was not compiled here."""
        return model._orig_mod if any(model is taken for taken in self._taken) else None  # pyright: ignore

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = self._own(*args, **kwargs)
        if isinstance(made, nn.Module) and hasattr(made, "_orig_mod"):
            inner: Any = made._orig_mod
            made.forward = inner.__call__
            self._taken.append(made)
        return made


@dataclass
class _Planner:
    """Mutable: plans and applies once, and keeps the result."""

    flags: MemoryFlags
    plan: Plan | None = None
    refusal: TightfitError | None = None
    applied: list[AppliedPlan] = field(default_factory=list)
    compiling: TakenOverCompile = field(default_factory=TakenOverCompile)
    compiles: bool = False

    def __call__(self, model: nn.Module) -> PreparedScript:
        self.compiling.end()
        try:
            held = without_ddp(model)
            taken = self.compiling.under(held)
            inner = held if taken is None else taken
            check_unwrapped(inner)
            if taken is not None:
                self.compiles = True
                check_compiling(self.flags)
            # The scripts add up gradients in every micro-batch.
            ranks = ranks_of_model(model, WHO, no_sync=False, inner=inner)
            blocks = blocks_of(inner, self.flags)
            compiles = taken is not None
            with running_request(inner, blocks=blocks, called=model, world=ranks.world, compiles=compiles) as request:
                batch = request.batch
                self.plan = ranks.plan(inner, [batch], self.flags, lambda: make_plan(request, self.flags))
            self.applied.append(self.plan.apply(inner))
            return PreparedScript(request.resident or (), is_compiled=self.plan.lever(CompiledBlocks) is not None)
        except TightfitError as error:  # kept, because the script may catch the exception
            self.refusal = error
            raise

    def undo(self) -> None:
        while self.applied:
            self.applied.pop().undo()


def check_compiling(flags: MemoryFlags) -> None:
    """Raise `ModelError` where a plan cannot compile the blocks of a model that the script compiles."""
    if flags.memory_budget is None:
        raise ModelError(
            "--use_checkpoint recomputes blocks as eager code, and the script compiles the model: leave out "
            "--use_compile 1, or give a --memory_budget, whose plan compiles blocks"
        )


def check_unwrapped(model: nn.Module) -> None:
    """Raise `ModelError` for a model that is compiled otherwise than by the script's `torch.compile(model)`, or
    distributed over devices by one process.
    """
    if wrapper_of(model) == COMPILED:
        raise ModelError(
            "the model is compiled, and not by torch.compile(model) of the script: leave out its compiling, or the "
            "budget"
        )
    if any(map(is_distributed, model.parameters())):
        raise ModelError("the model is sharded, and MiniMind's scripts are planned in DistributedDataParallel only")
    if isinstance(model, nn.DataParallel):
        raise ModelError("the model is wrapped in DataParallel: start one process for each device with torchrun")


def blocks_of(model: nn.Module, flags: MemoryFlags) -> str | None:
    """A glob over the modules to recompute; None for the repeated blocks. Raises `ModelError` if there are none."""
    blocks = find_blocks(model)
    if not blocks:
        raise ModelError(f"{type(model).__name__} has no repeated blocks, so there is nothing to recompute")
    if not flags.ffn_only:
        return None
    children = [name for name, _ in model.get_submodule(blocks[0]).named_children()]
    for name in FEED_FORWARD:
        if name in children:
            return f"{blocks[0].rpartition('.')[0]}.*.{name}".lstrip(".")
    raise ModelError(
        f"--ffn_only: {blocks[0]} has no part named {' or '.join(FEED_FORWARD)}, but {', '.join(children)}"
    )


def make_plan(request: Request, flags: MemoryFlags) -> Plan:
    """The plan for the budget, or the plan of the rule; of several ranks, for all."""
    if flags.memory_budget is None:
        return rule_plan(request, flags.segments)
    if request.world is not None:
        return plan_of_ranks(search_ranks(request, request.world, flags.memory_budget))
    search = Search(request, flags.memory_budget)
    return as_plan(search, fastest(search))


def rule_plan(request: Request, segments: int | None) -> Plan:
    """A plan that recomputes every block, in segments if given. Its budget is its own peak. Raises `LeverError`."""
    search = Search(request, "1x")
    count = len(search.paths)
    if segments is not None and segments > count:
        raise LeverError(f"--segments {segments} is out of range: the model has {count} blocks")
    rule = every_block(search.paths, segments=segments)
    search.routing_matters = search.plain.peak_depends_on_data
    candidate = search.trace_applied(request.plain, rule.policies, joined=rule.joined)
    search.limit_bytes = candidate.needed_bytes
    if request.world is None:
        return as_plan(search, candidate)
    peaks = (candidate.peak_bytes,) * request.world.size  # DDP's ranks are alike
    found = RanksFound(search, candidate, peaks, search.plain, search.budget_bytes, request.world)
    return plan_of_ranks(found)
