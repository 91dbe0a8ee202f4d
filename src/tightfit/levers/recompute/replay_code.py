"""A replay as one Python function: a loop that interprets it takes longer than a small operator."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.levers.recompute.block_programs import Replay, ReplayedStep
from tightfit.runtime.bindings import binding_with
from tightfit.runtime.internals import no_modes

# Takes the contents of all values, the promises that wait for each, and a function that runs one step carefully.
Replayed = Callable[[list[Any], dict[int, Any], Callable[..., None]], None]


def code_of(replay: Replay) -> Replayed:
    """A function that does what a replay did that has run once: that run showed in which geometry values come."""
    known: dict[str, Any] = {"give": give}
    lines = ["def replayed(contents, waiting, carefully):"]
    for number, step in enumerate(replay.steps):
        if step.reads is None:
            known[f"step{number}"] = step
            lines.append(f"carefully(step{number}, contents, waiting)")
        else:
            lines += _lines_of(number, step, step.reads, known)
        lines += [f"contents[{value}] = None" for value in step.done]
    exec(compile("\n    ".join(lines), "<replay of a block>", "exec"), known)
    return known["replayed"]


def give(promises: Iterable[Any], content: torch.Tensor) -> None:
    """Give a value to what waits for it."""
    for promise in promises:
        promise.content = content


def _lines_of(number: int, step: ReplayedStep, reads: list[tuple[int, int, Any]], known: dict[str, Any]) -> list[str]:
    """One operator, and what becomes of its results. What the lines name is put into `known`."""
    operator, args, kwargs = step.step.step.operator, list(step.args), step.step.step.kwargs
    text = [f"constant{number}_{place}" for place in range(len(args))]
    for slot, (place, value, geometry) in zip(step.step.step.slots, reads, strict=True):
        size, stride, _, dtype, *_ = slot.geometry
        with no_modes():
            args[place] = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        text[place] = f"contents[{value}]"
        if geometry is not None:
            known[f"over{number}_{place}"] = geometry.over
            held = ".base()" if value in step.roots else ""
            text[place] = f"over{number}_{place}(contents[{value}]{held})"
    known.update(zip((f"constant{number}_{place}" for place in range(len(args))), step.args, strict=True))
    known[f"run{number}"] = binding_with(operator, tuple(args), kwargs)
    if kwargs:
        known[f"named{number}"] = kwargs
        text.append(f"**named{number}")
    call = f"run{number}({', '.join(text)})"
    values = [value for _, value in step.step.outputs]
    if step.is_single:
        lines = [f"contents[{values[0]}] = {call}"]
    else:
        # The name is free again before the next operator runs, which may need the memory.
        lines = [f"results = {call}"]
        lines += [f"contents[{value}] = results[{position}]" for position, value in step.step.outputs]
        lines.append("results = None")
    return lines + [f"if {value} in waiting: give(waiting[{value}], contents[{value}])" for value in values]
