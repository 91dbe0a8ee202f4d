"""What a block's run did: the functions that it called, in order. Its next run probably calls the same ones again.

Values are numbered within a run: the memory that the block reads from outside, and what its functions compute. Tensors
have numbers of their own, since several can be views of one value. A tensor of the run is known by its identity, so a
run that repeats another one (`repeat.py`) neither reads shapes and strides again nor writes records.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tightfit.levers.recompute.programs import Program, Step
from tightfit.levers.recompute.values import ALIASED, EXPOSED, PRODUCT, Geometry
from tightfit.runtime.internals import attention_switches, dispatch_keys, function_switches

_BOUND = "_tightfit_bound"


class Seen(int):
    """A tensor among the arguments of a function, by the tensor's number."""


class Several(NamedTuple):
    """A list or tuple among the arguments of a function."""

    kind: type
    items: tuple


class Outside(NamedTuple):
    """A tensor that the block did not compute by recorded functions: a parameter, an input, a kept result."""

    signature: tuple
    value: int


class FunctionCall(NamedTuple):
    """One function that the block calls: a pure one, or (without a program) one that gives a view."""

    function: Callable[..., Any]
    args: tuple  # constants, with `Seen` in place of each tensor
    names: tuple[str, ...]
    kwargs: tuple  # by name
    switches: tuple
    program: Program | None
    is_recorded: bool  # else its results are memory that is kept
    inputs: list[int]  # the values of its tensors
    first: int  # the number of the first value that its program computes
    results: list[tuple[int | None, int | None]]  # its tensors: their numbers, and the values of those that it records
    saved: list[int | None]  # what autograd saves, by its number in `promised`; None for memory that is held


class BlockStep(NamedTuple):
    """One operator of the whole block."""

    step: Step
    values: list[int]  # of its slots
    outputs: list[tuple[int, int]]  # position among its flat results, and value
    becomes: list[tuple[int, int]]  # written argument, by index, and the value that it is afterwards
    place: int  # of its function


class ReplayedStep:
    """One operator of a replay."""

    __slots__ = ("args", "done", "is_single", "reads", "roots", "step")

    def __init__(self, step: BlockStep, done: list[int]):
        self.step = step
        self.done = done  # values that no later operator of the replay reads
        self.args = list(step.step.args)
        self.is_single = False  # it returns one tensor, as its first run has shown
        self.roots: set[int] = set()  # read values that are held, as its first run has shown
        # The place, value and geometry of each tensor among its arguments, if it has no others to look after. The
        # geometry becomes None if the value always comes in it.
        self.reads: list[tuple[int, int, Geometry | None]] | None = None
        if step.step.places is not None and not (step.step.written or step.step.draws):
            slots = zip(step.step.places, step.values, step.step.slots, strict=True)
            self.reads = [(place, value, slot.geometry) for place, value, slot in slots]


@dataclass
class Replay:
    """How to compute values again: operators in order."""

    steps: list[ReplayedStep]
    computed: frozenset[int]
    code: Callable[..., None] | None = None  # the same as a function, once it has run


class BlockProgram:
    """The functions of one run of a block."""

    def __init__(
        self,
        calls: list[FunctionCall],
        outside: dict[int, Outside],
        promised: list[tuple[int, Geometry]],
        kept: set[int],
        *,
        tensors: int,
        values: int,
        outputs: set[int],
    ):
        self.calls = calls
        self.outside = outside  # tensors by their numbers
        self.promised = promised  # what autograd saves
        self.tensors = tensors  # how many
        self.values = values  # how many
        self.outputs = outputs  # values that the block returns, which are held
        self.steps: list[BlockStep] = []
        found = {call.switches[1] for call in calls if call.program is not None and call.is_recorded}
        # The process's settings in all calls whose operators are recorded; None if they differ.
        self.switches: tuple | None = found.pop() if len(found) == 1 else None
        self.producers: dict[int, int] = {}  # the step that computes a value
        for place, call in enumerate(self.calls):
            if call.program is not None and call.is_recorded:
                self._add(place, call, call.program)
        self.needed = self._needed_for({value for value, _ in promised})  # in backward, of roots and outputs
        self.passing = kept - self.needed  # kept results that nothing has to hold
        self._replays: dict[tuple, Replay] = {}

    def _add(self, place: int, call: FunctionCall, program: Program) -> None:
        numbers = list(call.inputs)

        def new_value() -> int:
            number = call.first + len(numbers) - len(call.inputs)
            numbers.append(number)
            self.producers[number] = len(self.steps)
            return number

        for step in program.steps:
            values = [numbers[slot.value] for slot in step.slots]
            outputs = [(position, new_value()) for position in step.outputs]
            becomes = [(index, new_value()) for index in step.becomes]
            self.steps.append(BlockStep(step, values, outputs, becomes, place))

    def _needed(self, value: int, held: Iterable[int]) -> list[int]:
        """The steps that compute a value again, in order."""
        found, waiting, held = set(), [value], set(held)
        while waiting:
            producer = self.producers.get(waiting.pop())
            if producer is None or producer in found:
                continue
            found.add(producer)
            waiting += [read for read in self.steps[producer].values if read not in held]
        return sorted(found)

    def _computed(self, place: int) -> list[int]:
        """The values that a step computes."""
        step = self.steps[place]
        return [number for _, number in (*step.outputs, *step.becomes)]

    def _needed_for(self, promised: set[int]) -> set[int]:
        """The promised values, and all that is read where they are computed again."""
        places = {place for value in promised - self.outputs for place in self._needed(value, self.outputs)}
        return promised | {read for place in places for read in self.steps[place].values}

    def replay(self, value: int, held: tuple[int, ...]) -> Replay:
        """How to compute a value again, if some values are held."""
        found = self._replays.get((value, held))
        if found is None:
            last: dict[int, int] = {}
            needed = self._needed(value, held)
            for place in needed:
                last |= dict.fromkeys(self.steps[place].values, place)
                last |= dict.fromkeys(self._computed(place), place)
            done: dict[int, list[int]] = {}
            for read, place in last.items():
                done.setdefault(place, []).append(read)
            computed = frozenset(number for place in needed for number in self._computed(place))
            found = Replay([ReplayedStep(self.steps[place], done.get(place, [])) for place in needed], computed)
            self._replays[value, held] = found
        return found


def signature_of(tensor: torch.Tensor) -> tuple:
    """All of a tensor that a function's C++ code can branch on."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.requires_grad,
        dispatch_keys(tensor),
    )


def is_outside(storage: Any) -> bool:
    """Whether a storage is plain memory to the recorder: it computed nothing of it, and knows of no other writers."""
    known = storage.__dict__
    return not known or not (PRODUCT in known or EXPOSED in known or ALIASED in known)


def bound_value(storage: Any, token: object) -> int | None:
    """The number of a storage's value in the run of this token."""
    owner, value = storage.__dict__.get(_BOUND, (None, None))
    return value if owner is token else None


def bind(storage: Any, token: object, value: int) -> None:
    storage.__dict__[_BOUND] = token, value


def switches_for(function: Callable[..., Any]) -> tuple:
    """The settings on which depends what a function does."""
    here = torch.is_grad_enabled(), function_switches()
    return (*here, attention_switches()) if function is torch.nn.functional.scaled_dot_product_attention else here
