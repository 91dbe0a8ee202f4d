"""Learns which operators a pure function calls, from a call that runs under the recorder's dispatch mode."""

import itertools
from typing import Any

import torch

from tightfit.levers.recompute.generators import draws
from tightfit.levers.recompute.policy import operands_of
from tightfit.levers.recompute.programs import Call, Program, Slot, Step
from tightfit.levers.recompute.values import Geometry, has_plain_storage
from tightfit.runtime.operators import Traits, chooses, flat, instances, map_instances, written_arguments

_LEARNT = "_tightfit_learnt"
_numbers = itertools.count()


class Learner:
    """Learns the program of a call that runs under the dispatch mode."""

    def __init__(self, call: Call):
        self.number = next(_numbers)  # marks storages: memory that is freed meanwhile may come again
        self.values = len(call.tensors)
        self.steps: list[Step] = []
        self.saved: list[Slot | None] = []
        self.blank: set[int] = set()
        self.fails = False
        for value, (tensor, storage) in enumerate(zip(call.tensors, call.storages, strict=True)):
            if not has_plain_storage(tensor) or tensor.is_conj() or tensor.is_neg():
                self.fails = True
            if self._value(storage) is None:
                self._mark(storage, value)
        self.arguments = self.values

    def _mark(self, storage: Any, value: int) -> None:
        storage.__dict__[_LEARNT] = self.number, value

    def _value(self, storage: Any) -> int | None:
        number, value = storage.__dict__.get(_LEARNT, (None, None))
        return value if number == self.number else None

    def before(self, traits: Traits, args: tuple, kwargs: dict[str, Any]) -> Step | None:
        """Note the arguments of an operator before it runs."""
        if traits.is_foreign or traits.is_collective or traits.exchanges_memory:
            self.fails = True
        written = list(instances(torch.Tensor, written_arguments(traits, args, kwargs)))
        covers = traits.overwrites and all(t.numel() * t.itemsize == t.untyped_storage().nbytes() for t in written)

        slots: list[Slot] = []
        tensors: list[int] = []

        def slot(tensor: torch.Tensor) -> Any:
            value = self._value(tensor.untyped_storage()) if has_plain_storage(tensor) else None
            if value is None or (value in self.blank and not covers):
                self.fails = True
                return None
            slots.append(Slot(value, Geometry.of(tensor)))
            tensors.append(id(tensor))
            return slots[-1]

        if traits.written and not (traits.returns_written and len(written) == len(traits.written)):
            self.fails = True
        if self.fails:
            return None
        held = map_instances(torch.Tensor, slot, args)
        named = dict(zip(kwargs, map_instances(torch.Tensor, slot, kwargs.values()), strict=True))
        for tensor in written:
            value = self._value(tensor.untyped_storage())
            if value is None or value < self.arguments:
                self.fails = True  # it writes into an argument
        if self.fails:
            return None
        written_places = [tensors.index(tensor) for tensor in map(id, written)]
        places = [place for place, item in enumerate(held) if isinstance(item, Slot)]
        return Step(
            operator=None,
            traits=traits,
            args=held,
            kwargs=named,
            slots=slots,
            places=places if len(places) == len(slots) else None,
            written=written_places,
            outputs=[],
            becomes=[],
            draws=draws(traits, args, kwargs),
            operands=operands_of((*args, *kwargs.values())),
        )

    def after(self, step: Step | None, operator: Any, args: tuple, kwargs: dict[str, Any], results: Any) -> None:
        """Note the results of an operator."""
        if step is None or self.fails:
            self.fails = True
            return
        outputs = flat(results)
        if chooses(step.traits, results) or not all(out is None or isinstance(out, torch.Tensor) for out in outputs):
            self.fails = True  # a number decides what comes next, or an index that is kept
            return
        if step.traits.written:
            for index, target in enumerate(instances(torch.Tensor, written_arguments(step.traits, args, kwargs))):
                self._mark(target.untyped_storage(), self.values)
                step.becomes.append(index)
                self.values += 1
        else:
            for position, out in enumerate(outputs):
                if out is None:
                    continue
                if not has_plain_storage(out) or self._value(out.untyped_storage()) is not None:
                    self.fails = True
                    return
                self._mark(out.untyped_storage(), self.values)
                if step.traits.is_uninitialised:
                    self.blank.add(self.values)
                step.outputs.append(position)
                self.values += 1
        self.steps.append(step._replace(operator=operator))

    def save(self, tensor: torch.Tensor) -> None:
        """Note a tensor that autograd saves."""
        value = self._value(tensor.untyped_storage()) if has_plain_storage(tensor) else None
        # None for a number that PyTorch wrapped, for example.
        self.saved.append(None if value is None else Slot(value, Geometry.of(tensor)))

    def program(self, results: Any) -> Program | None:
        """The program, or None if it cannot be repeated."""
        found: list[int | None] = []
        for result in flat(results):
            if isinstance(result, torch.Tensor):
                value = self._value(result.untyped_storage()) if has_plain_storage(result) else None
                if value is None:
                    return None
                found.append(value if value >= self.arguments else None)
        draws_numbers = sum(step.draws for step in self.steps)
        # One state is saved, before the call. A second draw would begin at another one.
        if self.fails or draws_numbers > 1 or any(value in self.blank for value in found):
            return None
        return Program(self.steps, found, self.saved, bool(draws_numbers))
