"""Drafts a block's program from a run in which the recorder writes its records as ever."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.levers.recompute.block_programs import (
    BlockProgram,
    FunctionCall,
    Outside,
    Seen,
    Several,
    bind,
    bound_value,
    is_outside,
    signature_of,
    switches_for,
)
from tightfit.levers.recompute.programs import Program, Slot
from tightfit.levers.recompute.values import PLAIN, Geometry
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.operators import flat

_CONSTANTS = (int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))


def is_constant(item: Any) -> bool:
    """Whether an argument can be compared with one of another call."""
    if type(item) is slice:
        return all(bound is None or type(bound) is int for bound in (item.start, item.stop, item.step))
    return type(item) in _CONSTANTS or (type(item) is float and item == item)


class Draft:
    """A block's program in the making, while the recorder writes records as ever."""

    def __init__(self):
        self.token = object()
        self.calls: list[FunctionCall] = []
        self.outside: dict[int, Outside] = {}
        self.promised: list[tuple[int, Geometry]] = []  # what autograd saves
        self.kept: set[int] = set()  # values from outside that are kept results
        self.tensors = 0
        self.values = 0
        self.fails = False
        self._numbers: dict[int, tuple[weakref.ref, int]] = {}  # by identity
        self._value_of: list[int] = []  # tensors' values

    def _new_tensor(self, tensor: torch.Tensor, value: int) -> int:
        number = self.tensors
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        self._value_of.append(value)
        self.tensors += 1
        return number

    def _new_value(self) -> int:
        self.values += 1
        return self.values - 1

    def known(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that this run has seen."""
        reference, number = self._numbers.get(id(tensor), (None, None))
        return number if reference is not None and reference() is tensor else None

    def _argument(self, tensor: torch.Tensor) -> int:
        number = self.known(tensor)
        if number is not None:
            return number
        storage = tensor.untyped_storage()
        if not is_outside(storage):
            self.fails = True
        value = bound_value(storage, self.token)
        if value is None:
            value = self._new_value()
            bind(storage, self.token, value)
        number = self._new_tensor(tensor, value)
        self.outside[number] = Outside(signature_of(tensor), value)
        return number

    def _pattern(self, items: Iterable[Any], found: list[int]) -> tuple:
        pattern: list[Any] = []
        for item in items:
            if type(item) in PLAIN:
                number = self._argument(item)
                pattern.append(Seen(number))
                found.append(number)
            elif type(item) in (tuple, list, torch.Size):
                pattern.append(Several(type(item), self._pattern(item, found)))
            else:
                self.fails |= not is_constant(item)
                pattern.append(item)
        return tuple(pattern)

    def before(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, tuple, list[int]]:
        """Note the arguments of a function before it runs."""
        found: list[int] = []
        return self._pattern(args, found), self._pattern(kwargs.values(), found), found

    def after(
        self,
        function: Callable[..., Any],
        before: tuple[tuple, tuple, list[int]],
        kwargs: dict[str, Any],
        results: Any,
        *,
        program: Program | None = None,
        is_recorded: bool = False,
    ) -> None:
        """Note the results of a function."""
        args, named, tensors = before
        inputs = [self._value_of[number] for number in tensors]
        first = self.values
        if program is not None and is_recorded:
            self.values += sum(len(step.outputs) + len(step.becomes) for step in program.steps)
        places: list[tuple[int | None, int | None]] = []
        given = iter(program.results if program is not None and is_recorded else ())
        for result in flat(results):
            if not isinstance(result, torch.Tensor):
                continue
            computed = next(given, None)
            if computed is not None:
                value = first + computed - len(inputs)
                places.append((self._new_tensor(result, value), value))
                continue
            shared = self._shared(result, tensors)
            number = self.known(result)
            if number is None and shared is not None:
                number = self._new_tensor(result, shared)
            if number is None:  # new memory that is kept: functions that read it find it as a tensor from outside
                self.fails |= program is None or is_recorded
                self.kept.add(self.values)
                bind(result.untyped_storage(), self.token, self._new_value())
            places.append((number, None))
        saved = [] if program is None else [self._saved(slot, inputs, first, is_recorded) for slot in program.saved]
        self.calls.append(
            FunctionCall(
                function,
                args,
                tuple(kwargs),
                named,
                switches_for(function) if program is not None else (),
                program,
                is_recorded,
                inputs,
                first,
                places,
                saved,
            )
        )

    def _saved(self, slot: Slot | None, inputs: list[int], first: int, is_recorded: bool) -> int | None:
        """What is promised of a tensor that autograd saves, or None if its memory is held."""
        if slot is None:
            return None
        if slot.value >= len(inputs):
            if not is_recorded:
                return None
            value = first + slot.value - len(inputs)
        else:
            value = inputs[slot.value]
            if any(value == entry.value for entry in self.outside.values()):
                return None
        promise = value, slot.geometry
        if promise not in self.promised:
            self.promised.append(promise)
        return self.promised.index(promise)

    def _shared(self, result: torch.Tensor, tensors: list[int]) -> int | None:
        """The value of the argument whose memory a result is."""
        storage = result.untyped_storage()._cdata
        for reference, number in self._numbers.values():
            tensor = reference() if number in tensors else None
            if tensor is not None and tensor.untyped_storage()._cdata == storage:
                return self._value_of[number]
        return None

    def finished(self, outputs: Any) -> BlockProgram | None:
        """The program, or None if the block cannot be repeated."""
        if self.fails or not self.calls:
            return None
        returned = set()
        for tensor in tensors_in(outputs):
            number = self.known(tensor)
            if number is not None:
                returned.add(self._value_of[number])
        return BlockProgram(
            self.calls,
            self.outside,
            self.promised,
            self.kept,
            tensors=self.tensors,
            values=self.values,
            outputs=returned,
        )
