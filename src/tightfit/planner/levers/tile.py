"""The lever `tile`: tokenwise modules, such as feed-forwards, run over some tokens of the sequence at a time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tightfit.planner.levers.base import Exactness, Lever, PlainStep, Role, Suggestion, register
from tightfit.planner.levers.micro_batch import PARTS_SPREAD

if TYPE_CHECKING:
    from torch import nn

    from tightfit.levers.handle import Applied
    from tightfit.planner.records import BlockChoice

TILES = (2, 4, 8, 16)  # the numbers of tiles of a sequence that a search tries
LEAST_TILE = 32  # tokens


@register
@dataclass(frozen=True)
class TiledModules(Lever):
    """The modules at `paths` run over `tokens` tokens of the sequence at a time, and run again in backward."""

    paths: tuple[str, ...]
    tokens: int

    name = "tile"
    title = "tile"
    summary = "feed-forwards run on a part of the sequence at a time; a plan tries it only where nothing else fits"
    exactness = Exactness.ROUNDING
    role = Role.LAST
    spread = PARTS_SPREAD

    @classmethod
    def settings(cls, step: PlainStep) -> Sequence[Self]:
        from tightfit.levers.micro_batch import as_tensors
        from tightfit.planner.levers.tokenwise import find_tokenwise, longest_sequence

        modules = tuple(find_tokenwise(step.trace, step.model, step.blocks))
        length = longest_sequence(as_tensors(step.batch))
        sizes = [math.ceil(length / tiles) for tiles in TILES if length >= tiles * LEAST_TILE]
        return [cls(modules, size) for size in sizes if modules]

    def apply(self, model: "nn.Module") -> "Applied":
        from tightfit.levers.tile import tile_paths

        return tile_paths(model, self.paths, self.tokens)

    def sentence(self, choices: "Sequence[BlockChoice]") -> str:
        return f"{len(self.paths)} feed-forwards ({self.paths[0]}, ...) run over {self.tokens} tokens at a time."

    @classmethod
    def suggestions(cls, step: PlainStep) -> Sequence[Suggestion]:
        """The smallest number of tiles."""
        from tightfit.runtime.module_paths import globs_of

        suggestions = []
        for setting in cls.settings(step)[:1]:
            globs = globs_of(setting.paths)
            python = "; ".join(f'tightfit.tile(model, "{glob}", {setting.tokens})' for glob in globs)
            yaml = f"memory: {{budget: BUDGET, levers: [{cls.name}]}}"
            suggestions.append(Suggestion(f"feed-forwards in {setting}", python, yaml, lever=setting))
        return suggestions

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(tuple(raw["paths"]), raw["tokens"])

    def __str__(self) -> str:
        return f"tiles of {self.tokens} tokens"
