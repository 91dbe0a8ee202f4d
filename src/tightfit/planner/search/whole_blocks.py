"""Tries levers that change whole blocks (compiled ones): one setting for all blocks, then faster ones in some."""

from collections.abc import Sequence

from tightfit.errors import CompileError
from tightfit.planner.levers import Combination, Lever, Role
from tightfit.planner.records import Rejected
from tightfit.planner.search.bisection import halved
from tightfit.planner.search.candidates import Candidate
from tightfit.planner.search.fusing import fuse_blocks
from tightfit.planner.search.search import Search


def compile_blocks(search: Search, combinations: Sequence[Combination]) -> None:
    """Try compiled blocks beside these combinations: under the plan's choices, or else with PyTorch's own."""
    kinds = search.of_role(Role.WHOLE_BLOCKS)
    if not kinds or not combinations:
        return
    if fuse_blocks(search, [search.priced[each] for each in combinations if each in search.priced]):
        return
    for combination in combinations:
        for kind in kinds:
            try_whole_blocks(search, combination, kind)


def try_whole_blocks(search: Search, combination: Combination, kind: type[Lever]) -> None:
    """Try a lever that changes whole blocks, its fastest setting first, until one fits. Then use the faster
    settings before it in as many blocks as the budget allows.
    """
    # No bisection over the settings: with PyTorch's `activation_memory_budget` the peak need not fall from one
    # share to the next, so each setting is traced as applied.
    over: list[Lever] = []
    for setting in kind.settings(search.step()):
        alike = combination.with_lever(setting)
        try:
            candidate = search.trace_applied(alike, {})
        except CompileError as error:
            search.rejected.append(Rejected(str(alike), str(error)))
            return
        search.consider(candidate, str(alike))
        if search.excess(candidate) <= 0:
            # One share for all blocks is coarse: one step up may be far too much. Blocks that keep more use the
            # memory that is left, which made CPU26 5% faster at the same peak (notes/).
            for higher in dict.fromkeys(over[-1:] + over[:1]):
                mix(search, combination, setting, higher)
            return
        if search.best is not None and candidate.seconds >= search.best.seconds:
            return  # settings come fastest first, so the next ones are slower still
        over.append(setting)


def mix(search: Search, combination: Combination, setting: Lever, higher: Lever) -> None:
    """Use the faster setting `higher`, which exceeds the budget in all blocks, in as many blocks as fit."""
    found: dict[int, Candidate] = {}

    def fits(count: int) -> bool:
        found[count] = search.trace_applied(combination.with_lever(setting.mixed(higher, count)), {})
        return search.excess(found[count]) <= 0

    if count := halved(fits, 0, len(search.paths)):
        search.consider(found[count], str(found[count].combination))
