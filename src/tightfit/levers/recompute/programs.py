"""The operators that a pure function of PyTorch calls, learnt once for each signature of its arguments.

A signature is all that the function's C++ code can branch on: shapes, strides, dtypes, numbers, gradients, switches.
Two calls of one signature run the same operators with the same geometry, so the recorder learns them in a call under
its dispatch mode and writes the same records for later calls without it. A function whose operators it cannot repeat in
that way (they read a number, write into an argument, return indices, or are another library's) stays under the mode.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import ref as reference_to

import torch

from tightfit.errors import RecomputeError
from tightfit.levers.recompute.generators import GeneratorState, generator_of
from tightfit.levers.recompute.saved import Held, Late, Promise, hold
from tightfit.levers.recompute.values import (
    ALIASED,
    EXPOSED,
    PLAIN,
    PRODUCT,
    Geometry,
    Operation,
    Product,
    RecordingScope,
    Reference,
    Root,
    product_of,
    root_of,
    sequence_numbers,
)
from tightfit.runtime.internals import (
    attention_switches,
    autocast_is_active,
    dispatch_keys,
    function_switches,
)
from tightfit.runtime.operators import Traits, flat, map_instances

_MOST_PROGRAMS = 4096  # of ragged batches each length has its own
_CONSTANTS = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


class Slot(NamedTuple):
    """An argument of a step: a geometry over a value, by the value's number."""

    value: int
    geometry: Geometry


class Step(NamedTuple):
    """One operator of a program. Its new values have the next numbers: `outputs` (positions), then `becomes`."""

    operator: Any
    traits: Traits
    args: tuple
    kwargs: dict[str, Any]
    slots: list[Slot]  # in the order of the arguments
    places: list[int] | None  # of the slots in `args`, if all stand there and none in a list
    written: list[int]  # arguments that it writes into, by their place in `slots`
    outputs: list[int]
    becomes: list[int]  # written arguments, by index, each of which is a new value afterwards
    draws: bool
    operands: str  # of `operands_of`

    def run(self, tensors: list[Any]) -> list[Any]:
        """Run the operator with these tensors in its slots, and return its flat results."""
        if self.places is not None:
            args: Any = list(self.args)
            for place, tensor in zip(self.places, tensors, strict=True):
                args[place] = tensor
            return flat(self.operator(*args, **self.kwargs))
        found = iter(tensors)
        args = map_instances(Slot, lambda slot: next(found), self.args)
        values = map_instances(Slot, lambda slot: next(found), self.kwargs.values())
        return flat(self.operator(*args, **dict(zip(self.kwargs, values, strict=True))))


class Program(NamedTuple):
    """The steps of a call. Values are numbered: the tensors among its arguments, then what the steps compute.

    `results` are the values of the tensors that it returns, or None for memory of an argument. `saved` are those that
    autograd saves, in order, or None for a tensor that no operator computed.
    """

    steps: list[Step]  # none: it returns memory of an argument
    results: list[int | None]
    saved: list[Slot | None]
    draws: bool


PROGRAMS: dict[tuple, Program | None] = {}  # None: the function runs under the dispatch mode


class Call:
    """A call of a pure function: its signature, its tensors and their values, and what autograd saves while it runs."""

    __slots__ = ("key", "late", "storages", "tensors", "to_save", "values")

    def __init__(self, key: tuple, tensors: list[torch.Tensor], storages: list[Any]):
        self.key = key
        self.tensors = tensors
        self.storages = storages
        self.values: list[Any] = []  # of the arguments, then what the steps compute
        self.to_save: Iterator[Slot | None] = iter(())
        self.late: list[tuple[Late, Slot]] = []

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> "Call | None":
        """The call, or None if its arguments are not plain tensors and constants."""
        if autocast_is_active():  # a weight is cast once for all of its readers
            return None
        key: list[Any] = [function, torch.is_grad_enabled(), function_switches()]
        tensors: list[torch.Tensor] = []
        if not _read(args, key, tensors):
            return None
        if kwargs:
            key.append(tuple(kwargs))
            if not _read(kwargs.values(), key, tensors):
                return None
        if function is _ATTENTION:
            key.append(attention_switches())
        storages = [tensor.untyped_storage() for tensor in tensors]
        if len(storages) > 1:
            memory = [storage._cdata for storage in storages]
            key.append(tuple(map(memory.index, memory)))  # which arguments share memory
        return cls(tuple(key), tensors, storages)

    def begin(self, program: Program) -> bool:
        """Find the values of the arguments. False if the dispatch mode has to decide about one of them."""
        found: list[Root | Product] = []
        for tensor, storage in zip(self.tensors, self.storages, strict=True):
            known = storage.__dict__
            if known:
                if EXPOSED in known or ALIASED in known:
                    return False
                product = product_of(storage) if PRODUCT in known else None
                if product is not None:
                    if product.blank:
                        return False
                    if product.offload_store is not None:
                        product.secure(tensor)
                    found.append(product)
                    continue
            found.append(root_of(tensor, storage))
        self.values = found
        self.to_save = iter(program.saved)
        return True

    def save(self, tensor: torch.Tensor) -> Promise | Held | Late:
        """Saved-tensor hook, while the function runs. Autograd saves the same tensors for each call of a signature."""
        slot = next(self.to_save, MORE)
        if slot is None:
            return hold(tensor)
        if slot is MORE:
            raise saved_otherwise(self.key[0])
        number, geometry = slot
        if number >= len(self.values):  # a result, whose operator is not recorded yet
            late = Late(tensor)
            self.late.append((late, slot))
            return late
        value = self.values[number]
        return Promise(value, geometry) if type(value) is Product else hold(tensor)

    def fail(self) -> None:
        """Hold the results that autograd saved: the function has raised."""
        for late, _ in self.late:
            late.hold()

    def note(self, program: Program, state: GeneratorState | None, results: Any, scope: RecordingScope) -> None:
        """Write the records of the steps, and give results and saved results their values."""
        if next(self.to_save, MORE) is not MORE:
            raise saved_otherwise(self.key[0])
        values = self.values
        record(program, values, state, self.key[_SWITCHES], scope)
        numbers = program.results
        if type(results) is torch.Tensor:
            if numbers[0] is not None:
                results.untyped_storage().__dict__[PRODUCT] = values[numbers[0]]
        else:
            tensors = [result for result in flat(results) if isinstance(result, torch.Tensor)]
            for tensor, number in zip(tensors, numbers, strict=True):
                if number is not None:
                    tensor.untyped_storage().__dict__[PRODUCT] = values[number]
        for late, (number, geometry) in self.late:
            late.promise(values[number], geometry)


_SWITCHES = 2  # the place of the process's settings in a call's key
MORE: Any = object()  # autograd saves more than it did


def saved_otherwise(function: Callable[..., Any]) -> RecomputeError:
    """The error of a function for which autograd saves other tensors than before: promises would name wrong values."""
    return RecomputeError(
        f"autograd saves other tensors for {getattr(function, '__name__', function)} than in an earlier call with the "
        "same arguments, so this block cannot be recomputed: leave it out, and please report this"
    )


_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def _read(items: Any, key: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Add the signature of arguments to `key`. False if one of them is neither a tensor nor a constant."""
    for item in items:
        kind = type(item)
        if kind in PLAIN:
            # The dispatch keys tell devices, layouts, inference, conjugation and quantisation apart.
            keys = dispatch_keys(item)
            key += item.shape, item.stride(), item.storage_offset(), item.dtype, item.requires_grad, keys
            tensors.append(item)
        elif kind in _CONSTANTS:
            key += kind, item  # 1, 1.0 and True are equal
        elif kind is float:
            if item != item:
                return False
            key.append(item or repr(item))  # 0.0 and -0.0 are equal
            key.append(kind)
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append(kind)
            key.append(len(item))
            if not _read(item, key, tensors):
                return False
        else:
            return False
    return True


class ProgramOperation(Operation):
    """An operator call of a program: a step, and the values that it reads."""

    __slots__ = ("inputs", "step")

    def __init__(self, step: Step, values: list[Any], state: GeneratorState | None, switches: tuple):
        self.step = step
        self.generator_state = state if step.draws else None
        self.switches = switches
        self.sequence = next(sequence_numbers)
        self.outputs = []
        self.inputs = [values[slot[0]] for slot in step.slots]
        self.written = self.becomes = _NOTHING
        if step.written:
            self.written = [Reference(self.inputs[place], step.slots[place].geometry) for place in step.written]
            self.becomes = []
            for place in step.written:
                self.inputs[place] = None  # one reference, so that a replay sees whether only this operation has it

    def values(self) -> Iterator[Root | Product]:
        """The values that the operation reads."""
        yield from (value for value in self.inputs if value is not None)
        yield from (reference.value for reference in self.written)

    def call(self, replaced: dict[int, torch.Tensor]) -> list[Any]:
        """Run the operator and return its flat results, as `Operation.call` does."""
        step = self.step
        tensors = [
            None if value is None else slot[1].over(value.base())
            for slot, value in zip(step.slots, self.inputs, strict=True)
        ]
        for place, reference in zip(step.written, self.written, strict=True):
            tensors[place] = reference.geometry.over(replaced[id(reference)])
        return step.run(tensors)


_NOTHING: list[Any] = []


def record(
    program: Program, values: list[Any], state: GeneratorState | None, switches: tuple, scope: RecordingScope
) -> None:
    """Record the steps, as the dispatch mode would, and append the values that they compute to `values`.

    `switches` are the process's settings while they ran.
    """
    for step in program.steps:
        operation = ProgramOperation(step, values, state, switches)
        for position in step.outputs:
            product = Product(operation, scope, blank=step.traits.is_uninitialised)
            operation.outputs.append((position, reference_to(product)))
            values.append(product)
        for index in step.becomes:
            product = Product(operation, scope)
            operation.becomes.append((index, reference_to(product)))
            values.append(product)


def learn(call: Call, program: Program | None) -> None:
    """Remember what a call of this signature does."""
    if len(PROGRAMS) >= _MOST_PROGRAMS:
        PROGRAMS.clear()
    PROGRAMS[call.key] = program


def state_before(call: Call, kwargs: dict[str, Any]) -> GeneratorState:
    """The state of the generator that the call will draw from."""
    return GeneratorState.of(generator_of(tuple(call.tensors), kwargs))
