"""Restores everything that a dry step changed: gradients, attributes, containers, random states, version counters."""

import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from tightfit.optim.by_name import named_states
from tightfit.runtime.internals import set_version_counters
from tightfit.runtime.module_paths import named_modules, tensors_of
from tightfit.runtime.nested import INERT, tensors_in
from tightfit.tracing.reached import Reached
from tightfit.tracing.unbacked import is_unbacked

_MUTABLE = (dict, list, set, deque)
_GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
_HOLD_NOTHING = INERT | {torch.Tensor, nn.Parameter, types.MethodType, types.BuiltinFunctionType}
_DEPTH = 4  # levels of containers and objects below a module's attribute that are saved


@contextmanager
def everything_restored(model: nn.Module, *tensors: torch.Tensor) -> Iterator["Contents"]:
    """A context in which the model may run. Afterwards the model and all random generators are restored.

    The context's value is the model's attributes of before. The data of tensors is not restored here: the dry run
    restores what it writes.
    """
    attributes = attributes_of(model)
    watched = [*model.parameters(), *model.buffers(), *tensors]
    versions = [t._version for t in watched]
    gradients = [(t, t.grad) for t in (*model.parameters(), *tensors) if t.is_leaf]
    for parameter in model.parameters():
        parameter.grad = None
    with generators_restored():
        try:
            yield attributes
        finally:
            for tensor, gradient in gradients:
                tensor.grad = gradient
            attributes.restore()
            with torch.no_grad():
                set_version_counters(watched, versions)


@contextmanager
def reach_restored(loss: Any, model: nn.Module) -> Iterator[None]:
    """A context for a dry run. Afterwards nothing that a loss reaches beside the model holds a tensor without numbers:
    attributes of a loss that is an object, variables around a function, a teacher's buffers.

    Variables that its code has rebound refer to what they did before; what it counts in containers and attributes
    stays. The data of tensors is not restored here.
    """
    reached = Reached.of_call(loss, None)
    own = {id(module) for _, module in named_modules(model)}
    beside = [module.__dict__ for _, module in reached.paths_and_modules() if id(module) not in own]
    contents = Contents((reached.values, *beside))
    in_reach = [(item, item.copy()) for item in reached.containers]
    try:
        yield
    finally:
        for item, content in (*contents.contents, *in_reach):
            if content_changed(item, content) and any(map(is_unbacked, tensors_in(item))):
                put_content_back(item, content)
        reached.put_names_back()


@contextmanager
def untouched(model: nn.Module, batch: Any, loss: Any, *, weights: bool = True) -> Iterator["Contents"]:
    """A context in which a loss may run. Afterwards everything that it reaches is restored: the batch, and of the model
    and of modules beside it (a teacher that follows the student) weights, buffers and attributes.

    Without `weights`, the model's own are not kept. The value is the model's attributes of before.
    """
    reached = Reached.of_call(loss, batch)
    modules = {id(module): module for _, module in (*named_modules(model), *reached.paths_and_modules())}
    states = [state for optimizer in reached.optimizers for _, _, state in named_states(optimizer)]
    held = [*(t for module in modules.values() for t in tensors_of(module)), *reached.tensors, *states]
    own = {id(parameter): parameter for parameter in model.parameters()}
    inputs = {id(t): t for t in tensors_in(batch)}
    others = inputs | {id(t): t for t in held if id(t) not in own and _is_plain(t) and not t.is_inference()}
    containers = Contents((batch, reached.values, *(module.__dict__ for module in modules.values())))
    in_reach = [(item, item.copy()) for item in reached.containers]  # those of an object whose method is the loss too
    # On the host: a plan may fill the device, and the weights are the largest part of this.
    copied = [t for t in (others | own if weights else others).values() if _is_plain(t)]
    kept = [(t, t.detach().to("cpu", copy=True)) for t in copied]
    versions = [tensor._version for tensor in copied]
    try:
        with everything_restored(model, *others.values()) as attributes_before:
            for tensor in others.values():
                if tensor.is_leaf:
                    tensor.grad = None
            yield attributes_before
    finally:
        containers.restore()
        for item, content in in_reach:
            put_content_back(item, content)
        reached.put_names_back()
        with torch.no_grad():
            for tensor, content in kept:
                if not torch.equal(tensor, content.to(tensor.device)):
                    tensor.copy_(content)
            set_version_counters(copied, versions)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


@contextmanager
def generators_restored() -> Iterator[None]:
    """A context after which the random generators of Python, numpy and PyTorch, on the CPU and on every card that this
    process uses, are in their state of before.
    """
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=_cards()):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


def random_states(attributes: "Contents") -> dict[str, Any]:
    """The states of the random generators, to be compared: those of Python, numpy and PyTorch, and those that modules
    hold among their `attributes`.
    """
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        **{f"cuda:{card}": torch.cuda.get_rng_state(card) for card in _cards()},
        **{f"a module's own generator {n}": state_of(own) for n, (own, _) in enumerate(attributes.generators)},
    }
    return {f"random state of {name}": comparable(state) for name, state in states.items()}


def comparable(state: Any) -> Any:
    """A generator's state without arrays and tensors: `==` compares those by element, and `repr` leaves some out."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, numpy.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: comparable(value) for name, value in state.items()}
    return tuple(map(comparable, state)) if isinstance(state, (tuple, list)) else state


def _cards() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def attributes_of(model: nn.Module) -> "Contents":
    """The saved attributes of every module of a model, with the contents of containers and objects in them, and the
    random generators in reach.
    """
    return Contents([*(module.__dict__ for _, module in named_modules(model)), generators_beside(model)])


def generators_beside(model: nn.Module) -> list[Any]:
    """The random generators that the files of its classes name: `rng = random.Random(0)` above a class that draws."""
    files = {sys.modules.get(type(module).__module__) for _, module in named_modules(model)}
    named = [value for file in files - {None} for value in list(vars(file).values()) if isinstance(value, _GENERATORS)]
    return [generator for generator in named if generator is not torch.default_generator]


class Contents:
    """The saved contents of containers, nested ones too. With `in_objects`, also the attributes of objects in them,
    but for those that are `apart`.
    """

    def __init__(self, containers: Iterable[Any], in_objects: bool = True, apart: Iterable[Any] = ()):
        self.contents: list[tuple[Any, Any]] = []
        self.generators: list[tuple[Any, Any]] = []  # of random numbers, with their states
        self._in_objects = in_objects
        self._seen = {id(item) for item in apart}
        for container in containers:
            self._remember(container, depth=0)

    def _remember(self, item: Any, depth: int) -> None:
        if id(item) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(item))
        if isinstance(item, _MUTABLE):
            self.contents.append((item, item.copy()))
            self._remember_all(item.values() if isinstance(item, dict) else item, depth + 1)
        elif isinstance(item, tuple):
            self._remember_all(item, depth + 1)
        elif isinstance(item, _GENERATORS):
            self.generators.append((item, state_of(item)))
        elif self._in_objects and _has_state(item):
            self._remember(item.__dict__, depth + 1)

    def _remember_all(self, items: Iterable[Any], depth: int) -> None:
        for item in items:
            if type(item) not in _HOLD_NOTHING:  # decides most attributes of a model, without a call
                self._remember(item, depth)

    def changed(self) -> bool:
        """True if any container holds other things than before."""
        return any(content_changed(item, content) for item, content in self.contents if item or content)

    def restore(self) -> None:
        """Restore the contents of all containers that changed."""
        for generator, state in self.generators:
            set_state(generator, state)
        for item, content in self.contents:
            put_content_back(item, content)


def content_changed(item: Any, content: Any) -> bool:
    """True if a container holds other things than a copy of it that was made before."""
    if isinstance(item, dict):
        return not _same(item, content)
    if isinstance(item, list | deque):
        return len(item) != len(content) or any(a is not b for a, b in zip(item, content, strict=True))
    return item != content


def put_content_back(item: Any, content: Any) -> None:
    """Let a container hold again what a copy of it holds."""
    if (item or content) and content_changed(item, content):
        item.clear()
        item.extend(content) if isinstance(item, list | deque) else item.update(content)


def repeat_change(item: Any, before: Any, after: Any) -> None:
    """Change a container as it was changed from `before` to `after`, two copies of it, whatever it holds now."""
    if isinstance(item, dict):
        for key in before.keys() - after.keys():
            item.pop(key, None)
        item.update({key: value for key, value in after.items() if key not in before or before[key] is not value})
    elif isinstance(item, set):
        item.difference_update(before - after)
        item.update(after - before)
    elif len(after) >= len(before) and all(a is b for a, b in zip(before, after, strict=False)):
        item.extend(list(after)[len(before) :])
    else:
        put_content_back(item, after)


def state_of(generator: Any) -> Any:
    """The state of a random generator of PyTorch, numpy or Python."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator, generator.bit_generator.state
    return generator.get_state() if isinstance(generator, numpy.random.RandomState) else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to a state that `state_of` returned."""
    if isinstance(generator, numpy.random.Generator):
        bits, content = state
        if generator.bit_generator is not bits:
            generator.__init__(bits)
        bits.state = content
    elif isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _has_state(item: Any) -> bool:
    """True if an item is a plain object whose attributes may change: no tensor, module, class or function."""
    return hasattr(item, "__dict__") and not isinstance(
        item, torch.Tensor | nn.Module | type | types.ModuleType | types.FunctionType | types.MethodType
    )


def _same(item: dict, content: dict) -> bool:
    if len(item) != len(content):
        return False
    # A dict that nothing touched has the very keys of its copy, in their order.
    if all(map(operator.is_, item, content)) and all(map(operator.is_, item.values(), content.values())):
        return True
    return item.keys() == content.keys() and all(item[key] is content[key] for key in content)
