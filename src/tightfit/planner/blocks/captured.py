"""The tensors that captured blocks save, and the cost of their options, both from the prices of recorded ones."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from tightfit.levers.recompute import KEEP_ALL, Policy
from tightfit.planner.blocks.frontier import replay_cost
from tightfit.planner.blocks.graph import BlockGraph
from tightfit.planner.blocks.pricing import Priced
from tightfit.planner.blocks.solve import Option
from tightfit.planner.blocks.windows import calls_of, owning_blocks
from tightfit.planner.levers import Choice
from tightfit.tracing.record import StepTrace
from tightfit.tracing.recording import ExecutorCost


def saved_seconds(trace: StepTrace, paths: Collection[str], executor: ExecutorCost) -> float:
    """The seconds of a step that its blocks at `paths` would save if they were captured, by the operators' own time.

    Captured blocks also write in place where eager code does not, which only a trace shows.
    """
    owners = owning_blocks(trace, list(paths))
    first, last = trace.repeated
    return sum(
        (operator.seconds - operator.seconds_with(executor.captured))
        * (trace.loop_repeats if first <= index < last else 1)
        for index, operator in enumerate(trace.operators)
        if owners[operator.call] is not None
    )


def priced_as_captured(priced: Priced, paths: Collection[str], trace: StepTrace, micro_batches: int) -> Priced:
    """The same blocks and bytes, with the seconds that each option takes if the blocks at `paths` are captured.

    An operator that runs again takes a captured operator's own time instead of the recorder's, and none is noted.
    """
    options = []
    for place, path in enumerate(priced.paths):
        mine = priced.chain.options[place]
        if path in paths:
            graph, times = priced.graphs[place], calls_of(trace, path) * micro_batches
            choices = priced.choices[place]
            mine = tuple(
                replace(option, seconds=times * _replay_seconds(graph, choice.policy))
                for option, choice in zip(mine, choices, strict=True)
            )
        options.append(mine)
    return replace(priced, chain=replace(priced.chain, options=tuple(options)))


@dataclass(frozen=True)
class CapturedOption:
    """One option of a captured block: `option` with the seconds that it adds to the block as eager code, `shown` with
    those of recomputing alone.
    """

    choice: Choice
    option: Option
    shown: Option


@dataclass(frozen=True)
class Captured:
    """The options of captured blocks, for those at `paths`. `plain` is the whole step with no lever."""

    priced: Priced
    paths: tuple[str, ...]
    executor: ExecutorCost
    plain: StepTrace
    micro_batches: int

    def of(self, place: int) -> tuple[CapturedOption, ...]:
        """The options of the block at a place: its recorded ones that copy nothing to the host, with other seconds."""
        path = self.priced.paths[place]
        if path not in self.paths:
            return ()
        own = -saved_seconds(self.plain, [path], self.executor) * self.micro_batches / self.plain.loop_repeats
        shown = self._replayed.chain.options[place]
        return tuple(
            CapturedOption(choice, replace(option, seconds=option.seconds + own), option)
            for option, choice in zip(shown, self.priced.choices[place], strict=True)
            if not choice.policy.offloads
        )

    @cached_property
    def _replayed(self) -> Priced:
        return priced_as_captured(self.priced, self.paths, self.plain, self.micro_batches)


def _replay_seconds(graph: BlockGraph, policy: Policy) -> float:
    """Seconds of running again, in one captured call of a block, what its policy does not keep."""
    if policy == KEEP_ALL:
        return 0.0
    kept = frozenset(place for place, key in enumerate(graph.keys) if key in policy.kept)
    _, _, replayed = replay_cost(graph.operations, kept)
    return max(0.0, sum(graph.captured[place] for place in replayed))
