"""Runs a training step dry: the user's own code on plain tensors, every large computation left out.

Floating-point operators on large or unknown tensors are replaced by their shapes, and their results are ordinary
CPU tensors whose memory nobody touches. Views run for real; so does everything small or integer whose inputs are
known, so that masks, positions, routing and branches that look at data get true answers.
"""

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tightfit.activity import now
from tightfit.errors import TraceError
from tightfit.internals import ENGINE_CODE, is_dense, no_torch_dispatch
from tightfit.operators import Traits, is_index, map_instances, traits_of, written_arguments
from tightfit.trace.faults import faults
from tightfit.trace.hollow import is_hollow, set_hollow
from tightfit.trace.ledger import Cell, Ledger
from tightfit.trace.modules import ModuleTracker
from tightfit.trace.questions import ASKING, Questions
from tightfit.trace.record import Category, OperatorRecord, Phase
from tightfit.trace.rules import (
    ADDED_IN_PLACE,
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
from tightfit.trace.shapes import KNOWN_LIMIT, LARGEST_KNOWN, TensorShape, call_key, result_shapes
from tightfit.trace.workspace import Workspace, cpu_workspace

aten = torch.ops.aten

OperatorCost = Callable[[str, Sequence[TensorShape], Sequence[TensorShape], tuple], float]


def no_cost(name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple) -> float:
    """The cost of an operator where nobody asked for seconds."""
    return 0.0


@dataclass(frozen=True)
class ExecutorCost:
    """Seconds that the recompute executor takes, beside the kernel, for an operator that it notes, or runs again."""

    recorded: float = 0.0
    replayed: float = 0.0

    def seconds(self) -> float:
        """For the operator that runs now."""
        return self.replayed if now.recomputing else self.recorded if now.recording else 0.0


NO_EXECUTOR_COST = ExecutorCost()


class DryRun(TorchDispatchMode):
    """The mode under which a step runs dry; fills a `Ledger` and a list of operators."""

    def __init__(
        self,
        ledger: Ledger,
        modules: ModuleTracker,
        cost: OperatorCost = no_cost,
        workspace: Workspace = cpu_workspace,
        routing: Routing = Routing.BALANCED,
        executor: ExecutorCost = NO_EXECUTOR_COST,
    ):
        super().__init__()
        self.executor = executor
        self.ledger = ledger
        self.modules = modules
        self.cost = cost
        self.workspace = workspace
        self.routing = routing
        self.phase = Phase.FORWARD
        self.questions = Questions(modules)
        self.operators: list[OperatorRecord] = []
        self.levels: list[int] = []
        self.starts: list[int] = []
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory written for real, and what it held
        self.with_gradient: tuple[str, ...] = ()
        self.gradients_before: tuple[str, ...] = ()
        self.strangers: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # leaves beside the model, their gradients
        self._costs: dict[Any, tuple[float, int]] = {}
        self._sum: tuple[int, int] | None = None  # a sum of gradients just made: its left operand, when
        self._imported = len(sys.modules)
        faults.watch()

    # What the dispatcher calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and a wrapper's frames would stand between us and our caller

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(map(answers_itself, types)):
            return NotImplemented  # the operators that it calls in turn come here again
        traits = traits_of(func)
        if traits.is_view:
            return self.view(func, args, kwargs)
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        cells = [self.see(t) for t in inputs]
        unknown = not all(cell.known for cell in cells)
        if unknown and (answered := self.questions.ask(func, args)) is not None:
            return answered.value
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

    def begin_again(self) -> None:
        """Forget the operators so far: what is recorded starts here."""
        self.settle_sum()
        for recorded in (self.operators, self.levels, self.starts):
            recorded.clear()
        self.ledger.begin_again()
        self.modules.begin_again()

    # The steps of one operator

    def view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        for tensor in tensors_in(args):
            self.see(tensor)
        out = func(*args, **kwargs)
        for tensor in tensors_in((out,)):
            self.see(tensor)
        return out

    def see(self, tensor: torch.Tensor) -> Cell:
        """The cell of a tensor's storage; one that nobody announced holds real data."""
        cell = self.ledger.cell_of(tensor)
        if cell is None:
            known = not is_hollow(tensor)
            cell = self.ledger.track(tensor, known=known, operator=None, forward=self.phase is Phase.FORWARD)
            if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                self.meet(tensor)
        return cell

    def meet(self, stranger: torch.Tensor) -> None:
        """A parameter that is none of the model's: one of the loss', or of modules in a plain list."""
        self.strangers.append((stranger, stranger.grad))
        if stranger.grad is not None:
            self.ledger.announce(stranger.grad, Category.GRADIENT, known=not is_hollow(stranger.grad))

    def begin(self, inputs: Sequence[torch.Tensor]) -> int:
        self.forget_imports()
        self.settle_sum()
        index = self.ledger.now = len(self.operators)
        self.starts.append(self.ledger.live_bytes)
        return index

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
            shape.bytes <= LARGEST_KNOWN
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
        return any(shape.bytes > LARGEST_KNOWN for shape in shapes_in(shapes))

    def compute(self, traits: Traits, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run the operator for real, keeping what it overwrites of memory that is not ours."""
        for target in tree_iter(written_arguments(traits, args, kwargs)):
            if isinstance(target, torch.Tensor):
                self.keep_original(target)
        faults.operator = traits.name
        try:
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
            for target in tree_iter(targets):
                if isinstance(target, torch.Tensor):
                    self.see(target).known = False
            returns = len(func._schema.returns)
            return None if returns == 0 else targets[0] if returns == 1 else tuple(targets[:returns])
        shapes = self.shapes(func, args, kwargs, key)
        out = hollow_tensors(shapes)
        if func in CHOOSING:
            out = self.choose(func, args, out)
        if func in REDUCED_IN_PLACE:
            out = in_unreduced_memory(out, args[0], args[1])
            set_hollow(out)
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
                if index.numel() * index.dim() * 8 > LARGEST_KNOWN:
                    return [TensorShape((index.numel(),), (index.dim(),), torch.int64).hollow()] * index.dim()
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
            if tensor.dtype != torch.int64 or tensor.nbytes > LARGEST_KNOWN:
                return tensor
            indexes = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return indexes.copy_(assumed_choice(self.routing, tensor.shape, choice_bound(func, args)))

        self.questions.note(str(func), self.routing.value, moves_peak=True)
        return map_instances(torch.Tensor, chosen, (out,))[0]

    def account(
        self, traits: Traits, args: tuple, kwargs: dict, out: Any, index: int, *, known: bool
    ) -> tuple[int, ...]:
        """Enter fresh storages and new values. Returns the values that this operator made."""
        made = []
        if traits.written:
            for target in tensors_in(written_arguments(traits, args, kwargs)):
                made.append(self.ledger.new_value(self.see(target), index))
        forward = self.phase is Phase.FORWARD or now.recomputing > 0
        for tensor in tensors_in((out,)):
            if self.ledger.cell_of(tensor) is None:
                cell = self.ledger.track(tensor, known=known or not is_hollow(tensor), operator=index, forward=forward)
                made.append(cell.value)
        return tuple(made)

    def finish(
        self, traits: Traits, inputs: Sequence[torch.Tensor], args: tuple, out: Any, key: Any, reads: Any, makes: Any
    ) -> None:
        seconds, workspace = self.priced(traits, inputs, args, out, key)
        executor_seconds = self.executor.seconds()
        phase = Phase.RECOMPUTE if now.recomputing else self.modules.phase(self.phase)
        watched = phase is Phase.FORWARD
        module, call = self.modules.attribute(phase)
        self.levels.append(self.ledger.live_bytes + workspace)
        self.operators.append(
            OperatorRecord(
                traits.name, phase, module, seconds + executor_seconds, workspace,
                now.region if watched else None, now.occurrence, reads, makes, any(map(is_index, tensors_in((out,)))),
                executor_seconds=executor_seconds, call=call,
            )
        )  # fmt: skip
        self.note_sum(traits, inputs)

    def note(
        self,
        name: str,
        seconds: float,
        *,
        reads: tuple[int, ...] = (),
        makes: tuple[int, ...] = (),
        copied_bytes: int = 0,
    ) -> None:
        """Enter something that is no operator of PyTorch's and makes no storage, after `begin`."""
        phase = Phase.RECOMPUTE if now.recomputing else self.phase
        module, call = self.modules.attribute(phase)
        self.levels.append(self.ledger.live_bytes)
        self.operators.append(
            OperatorRecord(
                name, phase, module, seconds, 0, None, -1, reads, makes, False, copied_bytes=copied_bytes, call=call
            )
        )

    def priced(
        self, traits: Traits, inputs: Sequence[torch.Tensor], args: tuple, out: Any, key: Any
    ) -> tuple[float, int]:
        price = self._costs.get(key)
        if price is None:
            shapes = [TensorShape.of(t) for t in inputs]
            outputs = [TensorShape.of(t) for t in tensors_in((out,))]
            constants = tuple(a for a in args if not isinstance(a, torch.Tensor))
            price = self._costs[key] = (
                self.cost(traits.name, shapes, outputs, constants),
                self.workspace(traits.name, shapes, outputs, constants),
            )
        return price

    # Autograd's own in-place operators: it adds into a gradient that nobody else holds, and scatters into fresh zeros,
    # in place; but not under a dispatch mode. A view's memory is held by its base too.

    def note_sum(self, traits: Traits, inputs: Sequence[torch.Tensor]) -> None:
        is_sum = traits.name in ADDED_IN_PLACE and self.phase is Phase.BACKWARD and _called_by_engine()
        if is_sum and is_dense(inputs[0]) and not inputs[0]._is_view():
            self._sum = (self.see(inputs[0]).index, self.ledger.now)

    def settle_sum(self) -> None:
        """If the left operand was released right after the sum, the real step adds in place: no second buffer."""
        if self._sum is None:
            return
        left, when = self._sum
        self._sum = None
        entry = self.ledger.entries[left]
        if entry.died == when + 1:
            entry.died = when
            self.levels[when] -= entry.bytes

    def restore(self) -> None:
        """Put back what was overwritten for real, and the gradients of what is none of the model's."""
        for stranger, gradient in self.strangers:
            stranger.grad = gradient
        with torch.no_grad():
            for alias, content in self.originals.values():
                alias.copy_(content)


def tensors_in(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments or results, those in lists too; PyTorch's tree functions take three times as long."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors_in(item)


def hollow_tensors(shapes: Any) -> Any:
    """An operator's results, with an untouched tensor for each shape among them."""
    if isinstance(shapes, TensorShape):
        return shapes.hollow()
    if isinstance(shapes, list | tuple):
        return type(shapes)(map(hollow_tensors, shapes))
    return shapes


@functools.cache
def answers_itself(kind: type) -> bool:
    """Whether a class of tensors has operators of its own, such as quantised states or gradients on the host."""
    return kind.__torch_dispatch__ is not no_torch_dispatch


def shapes_in(shapes: Any) -> Iterator[TensorShape]:
    """The shapes among an operator's results."""
    return (shape for shape in tree_iter(shapes, is_leaf=_is_shape) if _is_shape(shape))


def _is_shape(item: Any) -> bool:
    return isinstance(item, TensorShape)


def _called_by_engine() -> bool:
    """Whether the operator was issued by autograd's engine itself, not by Python code that runs in backward."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "__torch_dispatch__":
        assert frame.f_back is not None, "only a mode asks"
        frame = frame.f_back
    return frame.f_back is not None and frame.f_back.f_code is ENGINE_CODE  # a thread of the engine's has no frame
