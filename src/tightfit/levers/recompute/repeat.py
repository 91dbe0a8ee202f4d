"""A run of a block that calls the functions of an earlier run again (`block_programs.py`).

Nothing is recorded while it does. Autograd saves promises that name a value of the run, and backward computes all of
them in one go. Whatever the earlier run did not do (another function, an operator that came without one, a write) makes
the recorder write the records so far, and continue as ever.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import ref as reference_to

import torch
from torch import nn

from tightfit.levers.recompute.block_programs import (
    BlockProgram,
    FunctionCall,
    Replay,
    ReplayedStep,
    Seen,
    Several,
    bind,
    bound_value,
    is_outside,
    signature_of,
    switches_for,
)
from tightfit.levers.recompute.draft import Draft
from tightfit.levers.recompute.generators import GeneratorState, generator_of
from tightfit.levers.recompute.programs import MORE, record, saved_otherwise
from tightfit.levers.recompute.replay_code import code_of, give
from tightfit.levers.recompute.saved import Awaited, Held, hold
from tightfit.levers.recompute.values import (
    HELD,
    PLAIN,
    PRODUCT,
    Geometry,
    Later,
    Product,
    RecordingScope,
    Root,
    forget_product,
    root_of,
    whole_storage,
)
from tightfit.runtime.activity import recomputation
from tightfit.runtime.internals import NoAutocast, autocast_is_active, function_switches
from tightfit.runtime.operators import flat

_MOST_RUNS = 6  # of a block on one kind of input, after which no more drafts are tried
_MOST_PROGRAMS, _MOST_KINDS = 16, 256  # of one block: ragged batches have many shapes


class Repeat:
    """One run.

    It is over as soon as its values are computed again, or its records are written. Autograd's promises hold it.
    """

    def __init__(self, program: BlockProgram, scope: RecordingScope):
        self.program = program
        self.scope = scope
        self.is_over = False
        self._place = 0  # of the next call
        self._tensors: list[weakref.ref | None] = [None] * program.tensors
        self._roots: list[Root | None] = [None] * program.values  # of values from outside
        self._token = object()  # marks their storages
        self._held: dict[int, Root] = {}  # values that the block returned
        self._states: dict[int, GeneratorState] = {}  # before the calls that draw
        self._saving: Iterator[int | None] = iter(())  # what autograd saves for the running call
        self._promised: list[weakref.ref[Awaited] | None] = [None] * len(program.promised)
        self._products: list[Any] = []  # all values, if the records are written while the block runs

    def next(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> FunctionCall | None:
        """The next call of the earlier run, or None if this one is another."""
        calls = self.program.calls
        if self._place == len(calls):
            return None
        call = calls[self._place]
        if call.function is not function or not self._agree(call.args, args):
            return None
        if kwargs or call.names:  # few functions have any
            named = tuple(kwargs) == call.names and self._agree(call.kwargs, tuple(kwargs.values()))
            if not named:
                return None
        if call.program is not None:
            # Under autocast, a weight is cast once for all of its readers.
            if call.switches != switches_for(function) or autocast_is_active():
                return None
            if call.program.draws:
                self._states[self._place] = GeneratorState.of(generator_of(args, kwargs))
        self._saving = iter(call.saved)
        return call

    def _agree(self, expected: tuple, items: tuple | list) -> bool:
        """Whether arguments are those of the earlier run."""
        if len(expected) != len(items):
            return False
        for want, item in zip(expected, items, strict=True):
            kind = type(want)
            if kind is Seen:
                reference = self._tensors[want]
                if reference is None:
                    if not self._bind(want, item):
                        return False
                elif reference() is not item:
                    return False
            elif kind is Several:
                if type(item) is not want.kind or not self._agree(want.items, item):
                    return False
            elif want is not item and not (type(item) is kind and want == item and (want or repr(want) == repr(item))):
                return False  # 1, 1.0 and True are equal, and so are zeros of two signs
        return True

    def _bind(self, number: int, tensor: Any) -> bool:
        """Take a tensor from outside for one of the earlier run, if it is like it."""
        expected = self.program.outside.get(number)
        if expected is None or type(tensor) not in PLAIN or signature_of(tensor) != expected.signature:
            return False
        storage = tensor.untyped_storage()
        if not is_outside(storage):
            return False
        value = bound_value(storage, self._token)
        if value is None:
            if self._roots[expected.value] is not None:
                return False
            bind(storage, self._token, expected.value)
            if expected.value not in self.program.passing:
                self._roots[expected.value] = root_of(tensor, storage)
        elif value != expected.value:
            return False
        self._tensors[number] = reference_to(tensor)
        return True

    def save(self, tensor: torch.Tensor) -> Awaited | Held:
        """Saved-tensor hook, while the function runs."""
        number = next(self._saving, MORE)
        if number is None:
            return hold(tensor)
        if number is MORE:
            raise saved_otherwise(self.program.calls[self._place].function)
        reference = self._promised[number]
        promise = None if reference is None else reference()
        if promise is None:
            promise = Awaited(self, *self.program.promised[number])
            self._promised[number] = reference_to(promise)
        return promise

    def _awaited(self) -> Iterator[Awaited]:
        """What autograd holds of this run."""
        for reference in self._promised:
            promise = None if reference is None else reference()
            if promise is not None:
                yield promise

    def note(self, call: FunctionCall, results: Any) -> None:
        """Note what the function returned."""
        if next(self._saving, MORE) is not MORE:
            raise saved_otherwise(call.function)
        self._place += 1
        given = (results,) if type(results) is torch.Tensor else tensors_among(results)
        for tensor, (number, value) in zip(given, call.results, strict=True):
            if number is not None:
                self._tensors[number] = reference_to(tensor)
            if value is not None:
                tensor.untyped_storage().__dict__[PRODUCT] = Later(self, value)

    def hold(self, value: int, tensor: torch.Tensor) -> None:
        """Hold the memory of a value that the block returns."""
        storage = tensor.untyped_storage()
        forget_product(storage)
        root = self._held[value] = root_of(tensor)
        for promise in self._awaited():
            if promise.value == value:
                promise.content = root
        storage.__dict__[HELD] = ProductOfHeld(self, value)

    def close(self) -> None:
        """The block has returned."""
        self._tensors = []
        self._products = []
        program = self.program
        if not self.is_over and self._place == len(program.calls) and program.outputs == self._held.keys():
            self._roots = [root if value in program.needed else None for value, root in enumerate(self._roots)]
            self._held = {value: root for value, root in self._held.items() if value in program.needed}

    def product(self, value: int) -> Product | None:
        """The record of a value, while the block runs."""
        self.build()
        product = self._products[value]
        return product if type(product) is Product else None

    def product_if_promised(self, value: int) -> Product | None:
        """The record of a value that the block returned, if autograd waits for it."""
        if not self.is_over:
            self.build()
        for promise in self._awaited():
            if promise.value == value:
                return promise.product
        return None

    def build(self) -> None:
        """Write the records of the functions so far."""
        if self.is_over:
            return
        self.is_over = True
        values: list[Any] = list(self._roots)
        for place, call in enumerate(self.program.calls[: self._place]):
            if call.program is not None and call.is_recorded:
                found = [values[number] for number in call.inputs]
                record(call.program, found, self._states.get(place), call.switches[1], self.scope)
                computed = found[len(call.inputs) :]
                values[call.first : call.first + len(computed)] = computed
        for value in self._lost():
            values[value] = None
        for value, root in self._held.items():
            if values[value] is not None:
                values[value].hold(root)
        for promise in self._awaited():
            promise.product = values[promise.value]
        self._roots = []
        if self.scope.is_open:
            self._products = values

    def _lost(self) -> set[int]:
        """The values that cannot be computed again, since they need memory that was not held.

        Only a run that was interrupted asks for one of them. The memory is then the truth, as of a kept result.
        """
        lost = {entry.value for entry in self.program.outside.values() if self._roots[entry.value] is None}
        for step in self.program.steps:
            if not lost.isdisjoint(step.values):
                lost |= {value for _, value in (*step.outputs, *step.becomes)}
        return lost

    def restore(self, value: int) -> None:
        """Compute a value, and what else autograd waits for, or write the records by which that is done."""
        program = self.program
        if not self.is_over and program.switches == function_switches():
            replay = program.replay(value, tuple(self._held))
            waiting: dict[int, list[Awaited]] = {}
            for promise in self._awaited():
                if promise.content is None:
                    waiting.setdefault(promise.value, []).append(promise)
            if waiting.keys() <= replay.computed:
                self.is_over = True
                self._replay(replay, waiting)
                self._roots = []
                return
        self.build()

    def _replay(self, replay: Replay, waiting: dict[int, list[Awaited]]) -> None:
        contents: list[Any] = list(self._roots)
        for value, root in self._held.items():
            contents[value] = root
        self._roots = []  # so that each is freed with its last reader
        self._held = {}
        with torch.no_grad(), NoAutocast(), recomputation():
            if replay.code is not None:
                replay.code(contents, waiting, self._carefully)
                return
            for step in replay.steps:
                if step.reads is not None:
                    run(step, step.reads, contents, waiting)
                else:
                    self._carefully(step, contents, waiting)
                for value in step.done:
                    contents[value] = None
        replay.code = code_of(replay)

    def _carefully(self, step: ReplayedStep, contents: list[Any], waiting: dict[int, list[Awaited]]) -> None:
        state = self._states[step.step.place] if step.step.step.draws else None
        with nullcontext() if state is None else state.repeated():
            run_carefully(step, contents, waiting)


def tensors_among(results: Any) -> list[torch.Tensor]:
    return [result for result in flat(results) if isinstance(result, torch.Tensor)]


def run(
    replayed: ReplayedStep,
    reads: list[tuple[int, int, Geometry | None]],
    contents: list[Any],
    waiting: dict[int, list[Awaited]],
) -> None:
    """Run one operator, and give its results to the promises that wait for them."""
    args = list(replayed.args)
    for index, (place, value, geometry) in enumerate(reads):
        content = contents[value]
        if type(content) is Root:
            assert geometry is not None  # a root may hold any tensor over its memory
            replayed.roots.add(value)
            content = geometry.over(content.base())
        elif geometry is not None:
            tensor = geometry.over(content)
            if tensor is content:
                reads[index] = place, value, None  # the operator that computes it always gives it this geometry
            content = tensor
        args[place] = content
    step = replayed.step
    results = step.step.operator(*args, **step.step.kwargs)
    replayed.is_single = isinstance(results, torch.Tensor)
    found = flat(results)
    if not replayed.is_single and len(found) != len(results):
        replayed.reads = None  # lists among them: the next replay takes the careful way
    for position, value in step.outputs:
        contents[value] = found[position]
        give(waiting.get(value, ()), found[position])


def run_carefully(replayed: ReplayedStep, contents: list[Any], waiting: dict[int, list[Awaited]]) -> None:
    """The same for an operator that writes into a value, draws random numbers, or takes lists of tensors."""
    step = replayed.step.step
    tensors = []
    for slot, value in zip(step.slots, replayed.step.values, strict=True):
        content = contents[value]
        tensors.append(slot.geometry.over(content.base() if type(content) is Root else content))
    written: list[torch.Tensor] = []
    for place in step.written:
        value = replayed.step.values[place]
        content = contents[value]
        if type(content) is Root or value in waiting or value not in replayed.done:  # somebody else reads it
            content = whole_storage(tensors[place]).clone()
        tensors[place] = step.slots[place].geometry.over(content)
        written.append(tensors[place])
    results = step.run(tensors)
    computed = [(results[position], value) for position, value in replayed.step.outputs]
    computed += [(written[index], value) for index, value in replayed.step.becomes]
    for content, value in computed:
        contents[value] = content
        give(waiting.get(value, ()), content)


class ProductOfHeld:
    """Gives the product of a value that a block returned, as a weak reference to it would."""

    def __init__(self, run: Repeat, value: int):
        self._run = reference_to(run)
        self._value = value

    def __call__(self) -> Product | None:
        run = self._run()
        return None if run is None else run.product_if_promised(self._value)


class KnownPrograms:
    """The programs of one block, by the kind of its input."""

    def __init__(self):
        self._programs: dict[tuple, BlockProgram] = {}
        self._runs: dict[tuple, int] = {}  # that repeated no program

    @staticmethod
    def kind_of(module: nn.Module, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple:
        """What tells inputs apart that take other programs."""
        shapes = [item.shape for item in (*args, *kwargs.values()) if isinstance(item, torch.Tensor)]
        return (module.training, *shapes)

    def begin(self, kind: tuple, scope: RecordingScope) -> Repeat | Draft | None:
        """A run begins: it repeats an earlier one, drafts a program, or does neither."""
        program = self._programs.get(kind)
        if program is not None:
            return Repeat(program, scope)
        if len(self._runs) >= _MOST_KINDS or len(self._programs) >= _MOST_PROGRAMS:
            self._runs.clear()
            self._programs.clear()
        runs = self._runs[kind] = self._runs.get(kind, 0) + 1
        # Not in the first one, in which functions are learnt: the shapes of many batches never come again.
        return Draft() if 1 < runs <= _MOST_RUNS else None

    def end(self, kind: tuple, run: Repeat | Draft, outputs: Any) -> None:
        """A run has ended."""
        if isinstance(run, Draft):
            program = run.finished(outputs)
            if program is not None:
                self._programs[kind] = program
        elif run.is_over:
            del self._programs[kind]  # it was interrupted
