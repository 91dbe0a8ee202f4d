"""Other ways to run a combination: its blocks compiled, or its feed-forwards tile by tile."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tightfit.levers.micro_batch import as_tensors
from tightfit.planner.records import TiledModules
from tightfit.planner.request import Combination, CompiledBlocks, Request
from tightfit.planner.tokenwise import find_tokenwise, longest_sequence
from tightfit.trace.record import StepTrace

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of what compiled blocks would like to keep, the fastest first
TILES = (2, 4, 8, 16)  # in how many parts feed-forwards may go through a sequence
LEAST_TILE = 32  # tokens


def compiled(combination: Combination, paths: Sequence[str], low: float, high: float, last: int) -> Combination:
    """The combination with the blocks at `paths` compiled: the `last` ones, whose backward comes first, keep the higher
    share.
    """
    first = len(paths) - last
    return replace(combination, compiled=CompiledBlocks({p: low if i < first else high for i, p in enumerate(paths)}))


def compiled_alike(combination: Combination, paths: Sequence[str]) -> list[Combination]:
    """The combination with its blocks compiled, all of them keeping the same; the fastest first."""
    return [compiled(combination, paths, share, share, 0) for share in SHARES] if paths else []


def tiled(combination: Combination, request: Request, plain: StepTrace, paths: Sequence[str]) -> list[Combination]:
    """The combination with the feed-forwards inside the blocks at `paths` run tile by tile, the fewest tiles first;
    `plain` is the step in which they are found.
    """
    modules = tuple(find_tokenwise(plain, request.model, paths))
    length = longest_sequence(as_tensors(request.batch))
    sizes = [math.ceil(length / tiles) for tiles in TILES if length >= tiles * LEAST_TILE]
    return [replace(combination, tiled=TiledModules(modules, size)) for size in sizes if modules]
