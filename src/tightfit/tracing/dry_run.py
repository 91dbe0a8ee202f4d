"""Runs a training step dry: the user's own code on plain tensors, every large computation left out.

Floating-point operators on large or unknown tensors are replaced by their shapes, and their results are ordinary
CPU tensors whose memory nobody touches. Views run for real; so does everything small or integer whose inputs are
known, so that masks, positions, routing and branches that look at data get true answers.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from tightfit.errors import TraceError
from tightfit.runtime.operators import Traits, instances, map_instances, traits_of, written_arguments
from tightfit.tracing.faults import faults
from tightfit.tracing.ledger import Cell, Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.questions import ASKING
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.recording import (
    NO_EXECUTOR_COST,
    ExecutorCost,
    OperatorCost,
    Recording,
    answers_itself,
    no_cost,
)
from tightfit.tracing.rules import (
    CHOOSING,
    INDEXING,
    LENGTHS,
    NEVER_COMPUTED,
    REDUCED_IN_PLACE,
    Routing,
    assumed_choice,
    choice_bound,
    in_unreduced_memory,
)
from tightfit.tracing.shapes import KNOWN_LIMIT, LARGEST_INTEGERS, TensorShape, call_key, result_shapes
from tightfit.tracing.unbacked import is_unbacked, set_unbacked
from tightfit.tracing.workspace import Workspace, cpu_workspace


class DryRun(Recording):
    """The mode under which a step runs dry."""

    def __init__(
        self,
        ledger: Ledger,
        modules: ModuleTracker,
        cost: OperatorCost = no_cost,
        workspace: Workspace = cpu_workspace,
        routing: Routing = Routing.BALANCED,
        executor: ExecutorCost = NO_EXECUTOR_COST,
    ):
        super().__init__(ledger, modules, cost, workspace, executor)
        self.routing = routing
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory written for real, and what it held
        self.strangers: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # leaves beside the model, their gradients
        self._imported = len(sys.modules)
        faults.watch()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(map(answers_itself, types)):
            return NotImplemented  # the operators that it calls in turn come here again
        traits = traits_of(func)
        if traits.is_view:
            return self.view(func, args, kwargs)
        inputs = [*instances(torch.Tensor, args), *instances(torch.Tensor, kwargs.values())]
        cells = [self.see(t) for t in inputs]
        unknown = not all(cell.known for cell in cells)
        if unknown and (answered := self.questions.ask(func, args)) is not None:
            return answered.value
        self.forget_imports()
        index = self.begin(inputs)
        reads = tuple(cell.value for cell in cells)
        if func in INDEXING:
            args = self.without_masks(args)
        if func in LENGTHS:
            args = self.with_lengths(func, args)
        key = call_key(func, args, kwargs)
        is_real = not unknown and self.is_cheap(func, traits, inputs, args, kwargs, key)
        out = self.compute(traits, func, args, kwargs) if is_real else self.imagine(traits, func, args, kwargs, key)
        makes = self.account(traits, args, kwargs, out, index, known=is_real)
        self.finish(traits, inputs, args, out, key, reads, makes)
        return out

    # The steps of one operator

    def see(self, tensor: torch.Tensor) -> Cell:
        """The cell of a tensor's storage; one that nobody announced holds real data."""
        cell = self.ledger.cell_of(tensor)
        if cell is None:
            known = not is_unbacked(tensor)
            cell = self.ledger.track(tensor, known=known, operator=None, forward=self.phase is Phase.FORWARD)
            if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                self.meet(tensor)
        return cell

    def meet(self, stranger: torch.Tensor) -> None:
        """A parameter that is none of the model's: one of the loss', or of modules in a plain list."""
        self.strangers.append((stranger, stranger.grad))
        if stranger.grad is not None:
            self.ledger.announce(stranger.grad, Category.GRADIENT, known=not is_unbacked(stranger.grad))

    def forget_imports(self) -> None:
        """Free what an import within the step left behind: cycles of frames and exceptions, which hold the frames that
        called for the import, and with them activations. Only a process's first step imports anything.
        """
        if len(sys.modules) != self._imported:
            gc.collect(0)  # the youngest objects: nothing older is made by an import
            self._imported = len(sys.modules)

    def is_cheap(
        self, func: Any, traits: Traits, inputs: Sequence[torch.Tensor], args: tuple, kwargs: dict, key: Any
    ) -> bool:
        """Whether a call with known inputs is computed for real: all integer, or small."""
        if func in NEVER_COMPUTED:
            return False
        if func in ASKING:
            return True
        if inputs and not any(t.is_floating_point() or t.is_complex() for t in inputs):
            return traits.returns_written or not self.is_vast(func, args, kwargs, key)
        if any(t.numel() > KNOWN_LIMIT for t in inputs):
            return False
        if traits.is_random and not inputs:
            return False
        return all(
            not shape.is_vast
            if not (shape.dtype.is_floating_point or shape.dtype.is_complex)
            else shape.numel <= KNOWN_LIMIT
            for shape in shapes_in(self.shapes(func, args, kwargs, key))
        )

    def is_vast(self, func: Any, args: tuple, kwargs: dict, key: Any) -> bool:
        """Whether an operator on integers makes more than is computed: a mask of a million tokens by a million."""
        if torch.Tag.dynamic_output_shape in func.tags:
            return False  # what it makes depends on its inputs, which are known
        try:
            shapes = self.shapes(func, args, kwargs, key)
        except TraceError:
            return False  # only the operator itself knows
        return any(shape.is_vast for shape in shapes_in(shapes))

    def compute(self, traits: Traits, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run the operator for real, keeping what it overwrites of memory that is not ours."""
        for target in instances(torch.Tensor, written_arguments(traits, args, kwargs)):
            self.keep_original(target)
        faults.operator = traits.name
        try:
            with one_thread():
                return func(*args, **kwargs)
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: this machine has no room for its "
                "results, which are computed since they may decide what the step does"
            ) from error
        finally:
            faults.operator = None

    def keep_original(self, target: torch.Tensor) -> None:
        cell = self.see(target)
        if self.ledger.entries[cell.index].operator is None and cell.index not in self.originals:
            with torch.no_grad():
                alias = target.detach()
                self.originals[cell.index] = (alias, alias.clone())

    def imagine(self, traits: Traits, func: Any, args: tuple, kwargs: dict, key: Any) -> Any:
        """Return what the operator would return, with nothing in it."""
        targets = written_arguments(traits, args, kwargs)
        if traits.returns_written:
            for target in instances(torch.Tensor, targets):
                self.see(target).known = False
            returns = len(func._schema.returns)
            return None if returns == 0 else targets[0] if returns == 1 else tuple(targets[:returns])
        shapes = self.shapes(func, args, kwargs, key)
        out = unbacked_tensors(shapes)
        if func in CHOOSING:
            out = self.choose(func, args, out)
        if func in REDUCED_IN_PLACE:
            out = in_unreduced_memory(out, args[0], args[1])
            set_unbacked(out)
        return out

    def without_masks(self, args: tuple) -> tuple:
        """Indexing by a mask, as indexing by the places where it is true; an unknown mask is assumed true
        everywhere.
        """

        def places(index: Any) -> list[Any]:
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                return [index]
            if not self.see(index).known:
                self.questions.note("where a computed mask is true", "everywhere", moves_peak=True)
                if index.numel() * index.dim() * 8 > LARGEST_INTEGERS:
                    return [TensorShape((index.numel(),), (index.dim(),), torch.int64).unbacked()] * index.dim()
                index = torch.ones(index.shape, dtype=torch.bool)
            return list(index.nonzero().unbind(1))

        return (args[0], [place for index in args[1] for place in places(index)], *args[2:])

    def with_lengths(self, func: Any, args: tuple) -> tuple:
        """The lengths on which the results' sizes depend as numbers; unknown ones are assumed to be 0."""

        def numbers(tensor: torch.Tensor) -> list[int]:
            if self.see(tensor).known:
                return tensor.tolist()
            self.questions.note(f"the lengths given to {func}", "0", moves_peak=True)
            return [0] * tensor.numel()

        return tuple(
            numbers(a) if i in LENGTHS[func] and isinstance(a, torch.Tensor) else a for i, a in enumerate(args)
        )

    def shapes(self, func: Any, args: tuple, kwargs: dict, key: Any) -> Any:
        try:
            return result_shapes(func, args, kwargs, key, self.is_known_number)
        except NotImplementedError as error:
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: PyTorch cannot tell its results' "
                "shapes without data: use another operator there, or register one with torch.library.register_fake"
            ) from error
        except RuntimeError as error:
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: {str(error).splitlines()[0]}: "
                "does the step run without a plan?"
            ) from error

    def is_known_number(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 0 and self.see(tensor).known

    def choose(self, func: Any, args: tuple, out: Any) -> Any:
        """The results of a choice, with the assumed indexes for those that nobody knows."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != torch.int64 or TensorShape.of(tensor).is_vast:
                return tensor
            indexes = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return indexes.copy_(assumed_choice(self.routing, tensor.shape, choice_bound(func, args)))

        self.questions.note(str(func), self.routing.value, moves_peak=True)
        return map_instances(torch.Tensor, chosen, (out,))[0]

    def restore(self) -> None:
        """Put back what was overwritten for real, and the gradients of what is none of the model's."""
        for stranger, gradient in self.strangers:
            stranger.grad = gradient
        with torch.no_grad():
            for alias, content in self.originals.values():
                alias.copy_(content)


@contextmanager
def one_thread() -> Iterator[None]:
    """What is computed for real is small: waking other threads for it, which then wait for more, costs most of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unbacked_tensors(shapes: Any) -> Any:
    """An operator's results, with an untouched tensor for each shape among them."""
    if isinstance(shapes, TensorShape):
        return shapes.unbacked()
    if isinstance(shapes, list | tuple):
        return type(shapes)(map(unbacked_tensors, shapes))
    return shapes


def shapes_in(shapes: Any) -> Iterator[TensorShape]:
    """The shapes among an operator's results."""
    return (shape for shape in tree_iter(shapes, is_leaf=_is_shape) if _is_shape(shape))


def _is_shape(item: Any) -> bool:
    return isinstance(item, TensorShape)
