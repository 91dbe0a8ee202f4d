"""Finds equal blocks of a model, and runs its step dry with a few of them.

Blocks of one class with weights of the same shapes and with the same levers do the same, one after the other in
forward and in the opposite order in backward. So the model is run without most of them, and its record is lengthened to
all (`tracing/lengthened.py`), or there is none: the caller runs the whole model.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from tightfit.memory.allocator import collector_off
from tightfit.runtime.module_paths import registered_modules
from tightfit.runtime.nested import INERT
from tightfit.tracing.lengthened import EqualBlocks, Unequal, lengthened
from tightfit.tracing.record import StepTrace

LONGEST = 8  # blocks of a group: layers of several kinds may take turns
# Numbers by which a block knows its place, and nothing else of what it does.
PLACES = ("idx", "index", "layer_id", "layer_number", "layer_num")


def equal_blocks(model: nn.Module, marks: Callable[[str], Hashable], reach: int = 1) -> list[EqualBlocks]:
    """The runs of equal blocks that are long enough to leave some out, the longest of each list. `marks` is what else
    has to be equal, such as the levers on a block, by its path; `reach` is as for `EqualBlocks`.
    """
    found: list[EqualBlocks] = []
    for holder, module in registered_modules(model):
        inside = any(holder.startswith(f"{run.holder}.") for run in found)
        if isinstance(module, nn.ModuleList) and not inside:
            paths = [f"{holder}.{name}".lstrip(".") for name in module._modules]
            kinds = [(kind_of(block, n), marks(p)) for n, (block, p) in enumerate(zip(module, paths, strict=True))]
            if (run := _longest_run(holder, paths, kinds, reach)) is not None:
                found.append(run)
    return found


def _longest_run(holder: str, paths: Sequence[str], kinds: Sequence[Hashable], reach: int) -> EqualBlocks | None:
    # Its neighbours are compared with the middle one, and none of the three is at an end.
    best, most, left = None, 0, 2 * reach + 3
    for size in range(1, min(LONGEST, len(paths) // left) + 1):
        same = [one == other for one, other in zip(kinds, kinds[size:], strict=False)]
        for equal, places in itertools.groupby(range(len(same)), same.__getitem__):
            first, *others = places
            groups = (len(others) + 1) // size + 1
            if equal and (groups - left) * size > most:
                most = (groups - left) * size
                cut = [tuple(paths[first + n * size : first + (n + 1) * size]) for n in range(groups)]
                before, behind = left // 2 + 1, left // 2 + 1 + groups - left
                best = EqualBlocks(holder, (*cut[:before], *cut[behind:]), tuple(cut[before:behind]), reach)
    return best


def kind_of(block: nn.Module, place: int) -> Hashable:
    """A block's classes, shapes, settings and hooks: all but its weights' numbers and its place."""
    found: list[Any] = []
    for path, module in registered_modules(block):
        tensors = [
            (name, t if t is None else (t.shape, t.dtype, t.requires_grad, type(t)))
            for held in (module._parameters, module._buffers)
            for name, t in held.items()
        ]
        settings = [
            (name, value)
            for name, value in vars(module).items()
            if (type(value) in INERT or (type(value) is tuple and all(type(each) in INERT for each in value)))
            and not (isinstance(value, int) and value >= place and name.endswith(PLACES))
        ]
        hooks = [(name, len(held)) for name, held in vars(module).items() if name.endswith("_hooks") and held]
        found.append((path, type(module), tuple(tensors), tuple(settings), tuple(hooks)))
    return tuple(found)


@contextmanager
def without_blocks(model: nn.Module, runs: Iterable[EqualBlocks]) -> Iterator[None]:
    """A context in which the model has none of the blocks that are left out. The others keep their paths."""
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for run in runs:
            holder = model.get_submodule(run.holder)
            gone = {path.rpartition(".")[2] for path in run.paths_out}
            before.append((holder, holder._modules))
            holder._modules = {name: block for name, block in holder._modules.items() if name not in gone}
        yield
    finally:
        for holder, modules in reversed(before):
            holder._modules = modules


def traced_with_few(
    model: nn.Module,
    marks: Callable[[str], Hashable],
    trace: Callable[[Callable[[str], bool]], StepTrace],
    reach: int = 1,
) -> StepTrace | None:
    """The record of a function that runs the model's forward and backward dry, made with few of its equal blocks; None
    if that cannot be. The function gets another one, which says of the path of a block or of a module whether the model
    has it now. `marks` and `reach` are as for `equal_blocks`.
    """
    if not (runs := equal_blocks(model, marks, reach)):
        return None
    out = {path for run in runs for path in run.paths_out}

    def is_left(path: str) -> bool:
        return path not in out and not any(path.startswith(f"{gone}.") for gone in out)

    try:
        with without_blocks(model, runs):
            found = trace(is_left)
    except Exception:  # a model may need all of its blocks: the caller runs them, and what is wrong itself fails there
        return None
    try:
        with collector_off():
            for run in runs:
                found = lengthened(found, run)
    except Unequal:
        return None
    return found
