"""The state that forward and backward change beside gradients, remembered before a step so that the step can be undone.

These are random states, buffers, tensors that modules hold as attributes, and the attributes themselves with the lists
and dicts in them. To copy all of it takes 60 ms for 400 modules, as long as a small step. So it is copied before the
first `OBSERVED` steps only, which show what a step changes. After them, only that is copied: nothing for most language
models, running statistics and counters for others. What begins to change later is seen by its count of writes, and
copied from then on. The copies lie in host memory outside of the allocator, until backward has ended.
"""

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tightfit.errors import RecoveryError
from tightfit.levers.recompute.generators import GeneratorState, default_generator
from tightfit.runtime.module_paths import named_modules, plain_tensors_of
from tightfit.tracing.restore import Contents, content_changed, generators_beside, put_content_back, set_state, state_of

OBSERVED = 2  # steps: the first one makes what is made lazily
LARGEST = 16 * 2**20  # bytes of a tensor that is copied: frozen weights that are buffers are larger, and never written


Content = tuple[Any, Any]  # a list, dict or set, and a copy of it


@dataclass
class _Held:
    """A buffer, or a tensor that a module holds, by its path. `copy` is its content before the step.

    The reference is weak: a module may put another tensor in the place of one that holds a graph.
    """

    path: str
    reference: weakref.ref[Tensor]
    writes: int = 0
    copy: Tensor | None = None
    is_watched: bool = False

    def remember(self, *, copies: bool) -> None:
        tensor = self.reference()
        if tensor is not None:
            self.writes = tensor._version
            self.copy = _copied(tensor) if copies else None

    @property
    def has_moved(self) -> bool:
        """True if the content differs from the copy, or was written since if there is none.

        Batch norm's kernels write the running statistics without counting that as a write, so contents decide.
        """
        tensor = self.reference()
        if tensor is None:
            return False
        if self.copy is None:
            return tensor._version != self.writes
        return not torch.equal(_bytes_of(tensor), self.copy)

    @property
    def is_small(self) -> bool:
        tensor = self.reference()
        return tensor is not None and tensor.nbytes <= LARGEST

    @torch.no_grad()
    def put_back(self) -> None:
        tensor = self.reference()
        if tensor is not None and self.copy is not None and self.has_moved:
            tensor.copy_(self.copy.view(tensor.dtype).view(tensor.shape))


@dataclass
class RandomStates:
    """The states of all generators that a step may draw from."""

    torch_states: list[GeneratorState]
    others: list[tuple[Any, Any]]  # of generators of numpy's and Python's that modules hold
    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=numpy.random.get_state)

    def put_back(self) -> None:
        for state in self.torch_states:
            state.put_back()
        for generator, state in self.others:
            set_state(generator, state)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)


class StepState:
    """Mutable: what a step is about to change in a model, and what the steps so far have shown that they change."""

    def __init__(self, model: nn.Module, *, in_objects: bool = True, apart: Sequence[Any] = ()):
        self._model = model
        self._apart = apart  # objects in modules that somebody else brings back
        self._in_objects = in_objects  # attributes of objects that modules hold: a guest's whole trainer may be there
        devices = {p.device for p in model.parameters()} | {torch.device("cpu")}
        self._generators = [default_generator(device) for device in sorted(devices, key=str)]
        self._tensors: list[_Held] = []
        self._containers: dict[int, Any] = {}  # those that were seen to change
        self._own_generators: dict[int, Any] = {}  # random generators that modules hold
        self._observed = 0
        self._random: RandomStates | None = None
        self._contents: list[Content] = []

    @property
    def is_observing(self) -> bool:
        """True if all is copied, since the steps that show what changes are not over."""
        return self._observed < OBSERVED

    def remember(self) -> None:
        """Before a step: keep what it may change."""
        if self.is_observing:
            self._look_around()
        else:
            self._contents = [(item, item.copy()) for item in self._containers.values()]
        for held in self._tensors:
            held.remember(copies=held.is_watched or (self.is_observing and held.is_small))
        self._random = self.random_states()

    def random_states(self) -> RandomStates:
        """As they are now."""
        own = self._own_generators.values()
        torchs = [*self._generators, *(each for each in own if isinstance(each, torch.Generator))]
        others = [(each, state_of(each)) for each in own if not isinstance(each, torch.Generator)]
        return RandomStates([GeneratorState.of(generator) for generator in torchs], others)

    def contents(self) -> list[Content]:
        """The current contents of the containers that a step may change."""
        return [(item, item.copy()) for item, _ in self._contents]

    def settle(self) -> None:
        """After backward: learn what the step has changed, and let go of the copies."""
        for held in self._tensors:
            held.is_watched = held.is_watched or held.has_moved
            held.copy = None
        if self.is_observing:
            changed = [item for item, content in self._contents if content_changed(item, content)]
            self._containers.update({id(item): item for item in changed})
            self._observed += 1
        self._contents, self._random = [], None

    def put_back(self) -> None:
        """Everything as `remember` found it. Can be called again.

        Raises `RecoveryError` where the step has changed a tensor of which there is no copy.
        """
        assert self._random is not None, "what a step changes is remembered before it"
        lost = next((h for h in self._tensors if h.copy is None and h.has_moved), None)
        if lost is not None:
            raise RecoveryError(
                f"the step that ran out of memory cannot be undone: it wrote into {lost.path}, which no step before it "
                f"did or which is larger than {LARGEST >> 20} MiB: resume from the newest checkpoint"
            )
        for item, content in self._contents:
            put_content_back(item, content)
        for held in self._tensors:
            held.put_back()
        self._random.put_back()

    def put_back_random(self) -> None:
        """The random states alone, if something has drawn from them since `put_back`."""
        assert self._random is not None, "what a step changes is remembered before it"
        self._random.put_back()

    def _look_around(self) -> None:
        containers = [*(module.__dict__ for _, module in named_modules(self._model)), generators_beside(self._model)]
        contents = Contents(containers, in_objects=self._in_objects, apart=self._apart)
        self._contents = contents.contents
        self._own_generators = {id(generator): generator for generator, _ in contents.generators}
        known = {id(held.reference()): held for held in self._tensors}
        found = _held_tensors(self._model)
        self._tensors = [known.get(id(tensor), _Held(path, weakref.ref(tensor))) for path, tensor in found]


def _held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and tensors that modules hold as attributes, each once; none of another layout than dense."""
    seen: set[int] = set()
    for path, module in named_modules(model):
        buffers = [(name, [buffer]) for name, buffer in module._buffers.items() if buffer is not None]
        for name, tensors in [*buffers, *plain_tensors_of(module)]:
            for tensor in tensors:
                if id(tensor) not in seen and type(tensor) is Tensor and tensor.layout is torch.strided:
                    seen.add(id(tensor))
                    yield f"{path}.{name}" if path else name, tensor


def _copied(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in memory that is numpy's."""
    return torch.from_numpy(_bytes_of(tensor).numpy().copy())


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
