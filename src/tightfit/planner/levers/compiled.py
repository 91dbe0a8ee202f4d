"""The lever `compile`: `torch.compile` compiles the blocks, each with an `activation_memory_budget`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tightfit.names import BUDGET_AND_COMPILED_BLOCKS
from tightfit.planner.levers.base import BlockLever, Exactness, PlainStep, Role, Suggestion, register

if TYPE_CHECKING:
    from tightfit.planner.records import BlockChoice

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # PyTorch's `activation_memory_budget` of a block, the fastest first


@register
@dataclass(frozen=True)
class CompiledBlocks(BlockLever):
    """Each block's path with its share: the `activation_memory_budget` with which it is compiled.

    The blocks at `paths` have no share: the plan's `choices` say what each of them keeps and recomputes.
    """

    shares: tuple[tuple[str, float], ...]
    paths: tuple[str, ...] = ()

    name = "compile"
    title = "compile"
    summary = "`torch.compile` compiles the blocks"
    exactness = Exactness.ROUNDING
    role = Role.WHOLE_BLOCKS
    spread = 1.05  # fused kernels round at other places: -3.2% to +3.3% (notes/exactness.md, "Rounding")
    on_request = True
    needs_blocks = True
    excludes = (BUDGET_AND_COMPILED_BLOCKS,)

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        """All blocks keep the same share."""
        return [cls(tuple((path, share) for path in step.blocks)) for share in SHARES] if step.blocks else []

    @classmethod
    def why_not(cls, step: PlainStep) -> str | None:
        return None if step.blocks else "the model has no repeated blocks"

    def mixed(self, higher: "CompiledBlocks", last: int) -> "CompiledBlocks":
        """This setting, with the shares of the `higher` one in the `last` blocks, whose backward comes first."""
        first = len(self.shares) - last
        return CompiledBlocks((*self.shares[:first], *higher.shares[first:]))

    def within(self, paths: Sequence[str]) -> "CompiledBlocks":
        known = set(paths)
        return CompiledBlocks(self.shares, tuple(path for path in self.paths if path in known))

    def captured(self) -> Mapping[str, bool]:
        return dict.fromkeys(self.paths, True)

    def compiled(self) -> Mapping[str, float]:
        return dict(self.shares)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return f"{len(self.shares) + len(self.paths)} of {len(choices)} blocks run as compiled code."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """All blocks at their fastest."""
        from tightfit.runtime.module_paths import globs_of

        python = "; ".join(f'tightfit.compile_blocks(model, "{glob}")' for glob in globs_of(step.blocks))
        found = cls.settings(step)[:1]
        return [Suggestion(str(each), python, "memory: {compile_blocks: true}", lever=each) for each in found]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(tuple((path, share) for path, share in raw["shares"]), tuple(raw.get("paths", ())))

    def __str__(self) -> str:
        if not self.shares:
            return f"{len(self.paths)} blocks compiled" if len(self.paths) != 1 else "1 block compiled"
        counts = Counter(share for _, share in self.shares)
        if len(counts) > 1:
            return "blocks compiled: " + ", ".join(f"{n} keeping {share:.0%}" for share, n in counts.items())
        return "all blocks compiled" + "".join(f", keeping {share:.0%}" for share in counts if share < 1)
