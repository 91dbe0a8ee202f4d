"""Finds one plan for all ranks of a world: the levers inside blocks, and what is chosen of FSDP2 (`Sharding`).

A rank's step is what the search plans, as it plans the step of one process otherwise: every trace plays FSDP2 or DDP
around the levers. So prices include gathered weights and buffers, and the plan's peak is that of a rank as it will run.
Each choice of FSDP2 is a search of its own, and the faster plan is taken.
"""

from dataclasses import dataclass, field, replace

from tightfit.errors import CannotFit, ModelError
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.records import Rejected
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES, Candidate
from tightfit.planner.search.fastest import fastest
from tightfit.planner.search.search import Search
from tightfit.ranks.messages import seconds_of_reductions
from tightfit.ranks.world import Sharding, World
from tightfit.ranks.wrapping import modules_apart
from tightfit.tracing.record import StepTrace
from tightfit.units import is_share_of

LOWERINGS = 3  # how often a plan is searched again where a rank other than the first exceeds the budget
# Of a step. Where messages run beside the computing, kept weights save little even without the levers that they need.
WORTH_A_SEARCH = 0.01
LITTLE = f"saves less than {WORTH_A_SEARCH:.0%} of the step, even without the levers that it needs"


@dataclass(frozen=True)
class RanksFound:
    """A search and its best candidate, with the peak of every rank, and the plain step of FSDP2's or DDP's defaults."""

    search: Search
    candidate: Candidate
    peaks: tuple[int, ...]
    plain: StepTrace
    budget_bytes: int
    world: World


def search_ranks(request: Request, world: World, budget: int | str, *, resorts: bool = True) -> RanksFound:
    """The fastest plan with which every rank is within the budget. Raises `CannotFit` with the least peak found.

    Without `resorts`, levers that are tried only where nothing else fits are left out.
    """
    default = Search(request, budget, resorts=resorts)
    if not world.is_sharded or world.shards is not None:  # of which a plan changes nothing
        return _searched(default, world, default)
    return _Shardings(request, world, default).found()


@dataclass
class _Shardings:
    """Mutable: the plans found so far, and why the others were not taken."""

    request: Request
    world: World
    default: Search
    rejected: list[Rejected] = field(default_factory=list)
    best: RanksFound | None = None
    error: CannotFit | None = None  # that of least bytes

    def found(self) -> RanksFound:
        bases = self.bases()
        for base in bases:
            self.take(base)
        self.keep_gathered(bases[0] if self.best is None else self.best.world.sharding)
        if self.best is None and self.request.shards_leave:
            # The update runs on the host then, so this is slower than whatever fits.
            self.take(replace(bases[0], on_host=True))
        if self.best is None:
            assert self.error is not None, "at least one search has ended"
            raise self.error
        self.reduce_once(self.best)
        self.best.search.rejected.extend(self.rejected)
        return self.best

    def bases(self) -> list[Sharding]:
        """The shardings to begin with: the blocks by themselves, or embedding and head too where that takes less."""
        whole = self.world.sharding
        if self.world.keeps_units:
            return [whole]
        paths = modules_apart(self.request.model, find_blocks(self.request.model, self.request.blocks))
        plain = self.default.plain
        if not paths or plain.peak_bytes <= self.default.budget_bytes:
            return [whole]
        apart = replace(whole, apart=paths)
        try:
            step = self.search(apart).plain
        except ModelError as error:
            self.rejected.append(Rejected(in_words(apart), str(error)))
            return [whole]
        if step.peak_bytes >= plain.peak_bytes:
            self.rejected.append(Rejected(in_words(apart), "takes no less", step.peak_bytes, step.step_seconds))
            return [whole]
        if step.step_seconds <= (1 + WORTH_A_SEARCH) * plain.step_seconds:
            return [apart]
        return [apart, whole]

    def keep_gathered(self, base: Sharding) -> None:
        """Try weights that stay gathered between forward and backward."""
        keeps = replace(base, reshard_after_forward=False)
        if self.best is not None:
            plain = self.search(keeps).plain
            most = (1 - WORTH_A_SEARCH) * self.best.candidate.seconds
            if plain.peak_bytes > self.default.budget_bytes and plain.step_seconds > most:
                self.rejected.append(Rejected(in_words(keeps), LITTLE, plain.peak_bytes, plain.step_seconds))
                return
        self.take(keeps)  # where nothing fits yet: its blocks can be joined to segments

    def reduce_once(self, best: RanksFound) -> None:
        """Try gradients that are exchanged in the last micro-batch only, where there are several."""
        count = best.candidate.combination.micro_batches
        if count == 1:
            return
        once = replace(best.world.sharding, reduces_once=True)
        trace = best.candidate.trace
        saved = seconds_of_reductions(trace) * (count - 1) / count
        if saved < WORTH_A_SEARCH * best.candidate.seconds:
            self.rejected.append(Rejected(in_words(once), LITTLE))
            return
        self.take(once)

    def take(self, sharding: Sharding) -> None:
        """Search with a choice of FSDP2, and keep the plan if it is the fastest."""
        try:
            found = _searched(self.search(sharding), replace(self.world, sharding=sharding), self.default)
        except CannotFit as error:
            if self.error is None or error.least_bytes < self.error.least_bytes:
                self.error = error.with_traceback(None)  # it has this frame, which keeps the model
            self.rejected.append(Rejected(in_words(sharding), "over the budget at its least", error.least_bytes))
            return
        slower = found
        if self.best is None or found.candidate.seconds <= self.best.candidate.seconds:
            self.best, slower = found, self.best
        if slower is not None:
            row = in_words(slower.world.sharding), "fits, but is slower"
            self.rejected.append(Rejected(*row, slower.candidate.peak_bytes, slower.candidate.seconds))

    def search(self, sharding: Sharding) -> Search:
        if sharding == self.world.sharding:
            return self.default
        world = replace(self.world, sharding=sharding)
        budget, resorts = self.default.budget, self.default.resorts
        # A share is one of the plain step with FSDP2's defaults.
        limit = self.default.budget_bytes if is_share_of(budget, "x") else None
        return Search(self.request.but(world=world), budget, resorts, limit_bytes=limit)


def in_words(sharding: Sharding) -> str:
    """A choice of FSDP2 in a few words."""
    keeps = sharding.reshard_after_forward is False
    words = ["gathered weights kept until backward" if keeps else "gathered weights freed after forward"]
    words += [f"{' and '.join(sharding.apart)} sharded apart"] if sharding.apart else []
    words += ["shards on the host"] if sharding.on_host else []
    words += ["gradients exchanged in the last micro-batch"] if sharding.reduces_once else []
    return f"FSDP2 with {', '.join(words)}"


def _searched(search: Search, world: World, default: Search) -> RanksFound:
    """The best candidate of a search, lowered until the largest of all ranks fits."""
    budget = search.budget_bytes
    for _ in range(LOWERINGS):
        try:
            candidate = fastest(search)
        except CannotFit as error:
            if search.budget_bytes == budget:
                raise
            raise _none_for_all(world, error.least_bytes + budget - search.budget_bytes) from error
        found = search.tracer.ranks(
            world, candidate.combination, candidate.policies, candidate.joined, first=candidate.trace
        )
        over = max(found.peaks) + UNSEEN_BYTES - budget
        if over <= 0:
            return RanksFound(search, candidate, found.peaks, default.plain, budget, world)
        # The first rank has the largest shards, but an optimizer that orders whole matrices may load another one more,
        # and so may attention with masks of a rank's own tokens.
        search = Search(search.request, search.budget, search.resorts, limit_bytes=search.budget_bytes - over)
    raise _none_for_all(world, max(found.peaks) + UNSEEN_BYTES)


def _none_for_all(world: World, least: int) -> CannotFit:
    return CannotFit(f"no plan was found with which all {world.size} ranks fit: the largest takes {least} bytes", least)
