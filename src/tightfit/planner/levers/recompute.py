"""The lever `recompute`: backward recomputes activations of blocks, bit for bit, instead of saving them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tightfit.names import BUDGET_AND_RECOMPUTE, RECOMPUTE_AND_COMPILED_BLOCKS, SEGMENTS_AND_REENTRANT
from tightfit.planner.levers.base import BlockKind, BlockLever, Choice, Exactness, PlainStep, Role, Suggestion, register

if TYPE_CHECKING:
    from tightfit.levers.recompute import Policy
    from tightfit.planner.records import BlockChoice

OPTIONS_PER_KIND = 12


@register
@dataclass(frozen=True)
class Recompute(BlockLever):
    """Has no fields: the plan's `choices` say which operators of which blocks are recomputed."""

    name = "recompute"
    title = "recompute"
    summary = "backward recomputes activations of blocks instead of saving them, as many as the budget requires"
    exactness = Exactness.EXACT
    role = Role.INSIDE_BLOCKS
    needs_blocks = True
    excludes = (BUDGET_AND_RECOMPUTE, RECOMPUTE_AND_COMPILED_BLOCKS, SEGMENTS_AND_REENTRANT)

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        return [cls()] if step.blocks else []

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        return None if step.blocks else "the model has no repeated blocks"

    @classmethod
    def options(cls, block: BlockKind, allowed: frozenset[str]) -> Sequence[Choice]:
        """Each keep set of a block that replays something."""
        from tightfit.levers.recompute import Policy

        # The first set replays nothing: that is the block without the lever.
        sets = block.keep_sets(OPTIONS_PER_KIND)[1:]
        return [Choice(Policy(block.keys(each.kept)), each.replay_seconds) for each in sets]

    @classmethod
    def frugal_policy(cls, allowed: frozenset[str]) -> "Policy":
        from tightfit.levers.recompute import RECOMPUTE_ALL

        return RECOMPUTE_ALL

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        count = sum(choice.action in ("recompute", "operators") for choice in choices)
        return f"{count} of {len(choices)} blocks recompute something in backward."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """Recompute every block as a whole."""
        if not step.blocks:
            return []
        from tightfit.levers.recompute import RECOMPUTE_ALL
        from tightfit.runtime.module_paths import globs_of

        globs = globs_of(step.blocks)
        python = "; ".join(f'tightfit.recompute(model, "{glob}")' for glob in globs)
        named = f'{{blocks: "{globs[0]}"}}' if len(globs) == 1 else "{}"
        name = f"recompute all {len(step.blocks)} blocks"
        return [Suggestion(name, python, f"memory: {{recompute: {named}}}", inside=RECOMPUTE_ALL)]
