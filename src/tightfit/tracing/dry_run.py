"""Runs a training step dry: the user's own code on plain tensors, without any large computation.

A floating-point operator on large or unknown tensors is replaced by its meta kernel. Its results are ordinary CPU
tensors whose memory is never touched. Views run for real. Small operators and integer operators run for real if their
inputs are known, so masks, positions, routing and data-dependent branches see true values.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_iter

from tightfit.devices.clocks import Seconds
from tightfit.errors import TraceError
from tightfit.memory.allocator import memory_of
from tightfit.ops.weights.experts import LOOPS
from tightfit.runtime.internals import (
    active_modes,
    fake_mode_is_active,
    has_kernel,
    is_custom_operator,
    no_modes,
    run_composite,
    run_kernel,
    runs_with,
)
from tightfit.runtime.operators import Traits, instances, map_instances, traits_of, written_arguments
from tightfit.runtime.simulation import simulation
from tightfit.tracing.collectives import simulate_collective
from tightfit.tracing.faults import faults
from tightfit.tracing.finite import known_everywhere
from tightfit.tracing.ledger import Cell, Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.outcomes import MOST_DRAWN, Generators
from tightfit.tracing.questions import ASKING, Answers, Questions
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.recording import (
    NO_EXECUTOR_COST,
    Call,
    ExecutorCost,
    OperatorCost,
    Recording,
    answers_itself,
    no_cost,
)
from tightfit.tracing.restore import Contents
from tightfit.tracing.rules import (
    CHOOSING,
    COUNTED,
    INDEXING,
    LENGTHS,
    NEVER_COMPUTED,
    RESIZED_IN_PLACE,
    Routing,
    assumed_choice,
    choice_bound,
    in_kept_memory,
    inside,
    on_host,
)
from tightfit.tracing.shapes import KNOWN_LIMIT, LARGEST_INTEGERS, TensorShape, inputs_and_key, result_shapes
from tightfit.tracing.unbacked import is_unbacked, set_unbacked
from tightfit.tracing.workspace import Workspace, cpu_workspace

FLEX = "torch.nn.attention.flex_attention"


class Lasting(NamedTuple):
    """The objects that exist before a dry step and after it: the attributes of the model's modules, and tensors.

    Without the trained weights, which every step changes.
    """

    attributes: Contents
    tensors: Sequence[torch.Tensor]


class DryRun(Recording):
    """The dispatch mode under which a step runs dry."""

    def __init__(
        self,
        ledger: Ledger,
        modules: ModuleTracker,
        cost: OperatorCost = no_cost,
        workspace: Workspace = cpu_workspace,
        routing: Routing = Routing.BALANCED,
        executor: ExecutorCost = NO_EXECUTOR_COST,
        answers: Answers | None = None,
    ):
        super().__init__(ledger, modules, cost, workspace, executor)
        if answers is not None:
            self.questions = Questions(modules, answers)
        self.routing = routing
        self.originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory written for real, and its content
        self.strangers: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # leaves outside the model, with gradients
        self.lasting: Lasting | None = None
        self.generators: Generators | None = None
        self.reads_draws = False  # whether code read a number that an operator drew, or results are as many as it says
        self._states = ""  # of other generators, where the recorded step begins
        self.loss_scale: torch.Tensor | None = None  # what `torch.amp.GradScaler` multiplies the loss by, on a card
        self._imported = len(sys.modules)
        faults.watch()

    def meets_compiled(self, function: Any) -> None:
        """The step calls a function that `torch.compile` made: it runs as eager code."""
        self.modules.mark_compiled()
        if getattr(function, "__module__", None) != FLEX:  # which takes what its kernel takes
            name = getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")
            self.questions.note(f"the code that torch.compile writes for {name}", "to take what eager code takes")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        answering = any(map(answers_itself, types))
        if (answering or not types) and fake_mode_is_active():
            return func(*args, **kwargs)  # PyTorch asks for shapes by fake tensors: distributed tensors do, once a call
        if answering:
            return NotImplemented  # the class runs its own operators, which come here again one by one
        if func is _ZEROS or asks_for_shapes(args, kwargs):
            return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.is_composed and not (simulation.of_cuda and traits.name in _COMPOSED_ON_CPU):
            with self:
                return run_kernel(func, "CPU", args, kwargs)
        if traits.is_composite and not has_kernel(func.name(), "CPU"):
            with self:
                return run_composite(func, args, kwargs)
        if traits.is_mark:
            return func(*args, **kwargs)
        if traits.is_collective:
            return simulate_collective(self, func, traits, args, kwargs, self.compute)
        if traits.is_view:
            return self.view(func, args, kwargs)  # allocates nothing, and autograd must see the real aliasing
        inputs, key = inputs_and_key(func, args, kwargs)
        cells = [self.see(t) for t in inputs]
        unknown = not all(cell.known for cell in cells)
        drawn = traits.is_random or any(cell.drawn for cell in cells)
        self.reads_draws |= drawn and (func in ASKING or func in COUNTED)
        everywhere = known_everywhere(func, args, self.is_everywhere) if unknown else None
        if unknown:
            phase = Phase.OPTIMIZER if simulation.updates else self.phase
            if (answered := self.questions.ask(func, args, self.is_everywhere, phase)) is not None:
                return answered.value  # `loss.item()`: there is no number to read
        self.forget_imports()
        index = self.begin(inputs)
        reads = tuple(cell.value for cell in cells)
        # Two kinds of operators have results whose shapes depend on numbers. Meta kernels need them as arguments.
        if traits.name in _INDEXING:
            args = self.without_masks(args)
            _, key = inputs_and_key(func, args, kwargs)
        if traits.name in _LENGTHS:
            args = self.with_lengths(func, args)
            _, key = inputs_and_key(func, args, kwargs)
        is_real = not unknown and self.is_cheap(func, traits, inputs, args, kwargs, key)
        if simulation.of_cuda and is_foreign(traits, func):
            self.note_seconds(traits.name)
        out = self.compute(traits, func, args, kwargs) if is_real else self.imagine(traits, func, args, kwargs, key)
        makes = self.account(traits, args, kwargs, out, index, known=is_real)
        if is_real and drawn:
            for tensor in instances(torch.Tensor, (out,)):
                self.see(tensor).drawn = True
        if everywhere is not None or any(cell.everywhere is not None for cell in cells):
            for tensor in instances(torch.Tensor, (out,)):
                self.see(tensor).everywhere = everywhere
        for place in on_host(func, args) if simulation.of_cuda else ():
            self.ledger.on_host(out[place])
        self.finish(traits, inputs, Call(func, args, kwargs), out, key, reads, makes)
        return out

    def priced(
        self, traits: Traits, inputs: Sequence[torch.Tensor], call: Call, out: Any, key: Any
    ) -> tuple[float, int]:
        known = key, simulation.host > 0
        if traits.name in LOOPS and known not in self._costs:
            self._costs[known] = self.price_of_loop(LOOPS[traits.name], call.args)
        return super().priced(traits, inputs, call, out, key)

    def price_of_loop(self, kernel: Callable[..., torch.Tensor], args: tuple) -> tuple[float, int]:
        """The seconds of an operator whose kernel calls other operators, and the most memory that it has beside its
        result.
        """
        ledger = Ledger(rounding=self.ledger.rounding, key="_tightfit_loop")
        inner = DryRun(ledger, self.modules, self.cost, self.workspace)
        args = map_instances(torch.Tensor, lambda tensor: TensorShape.of(tensor).unbacked(), args)
        ledger.track_all(instances(torch.Tensor, args))
        before = ledger.live_bytes
        with inner:
            out = kernel(*args)
        host, device = (sum(getattr(o, name) for o in inner.operators) for name in ("host_seconds", "device_seconds"))
        seconds = Seconds.of(host, device) if simulation.of_cuda else device
        made = ledger.entries[ledger.track(out, known=False, operator=None).index].bytes
        scratch = max(inner.levels) - before - made
        ledger.close()
        return seconds, scratch

    def begin_again(self) -> None:
        super().begin_again()
        self.begin_draws()

    def begin_draws(self) -> None:
        """Give the random generators the states from which the step that follows draws."""
        self.reads_draws = False
        if self.generators is not None:
            with no_modes():  # the states are tensors, and not the step's
                self.generators.begin()
                self._states = self.generators.states()

    def has_read_draws(self) -> bool:
        """True if the recorded step read numbers that were drawn at random."""
        return self.reads_draws or (self.generators is not None and self.generators.states() != self._states)

    # The steps of one operator

    def see(self, tensor: torch.Tensor) -> Cell:
        """The cell of a tensor's storage. A storage that was not announced, and has memory, holds known data."""
        cell = self.ledger.cell_of(tensor)
        if cell is None:
            known = not is_unbacked(tensor)
            cell = self.ledger.track(tensor, known=known, operator=None, forward=self.phase is Phase.FORWARD)
            if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                self.meet(tensor)
        return cell

    def is_everywhere(self, tensor: torch.Tensor) -> bool | None:
        """The value of all elements of a tensor of which nothing else is known; None if they may differ."""
        return self.see(tensor).everywhere

    def meet(self, stranger: torch.Tensor) -> None:
        """Register a parameter outside of the model: of the loss, or of modules in a plain list."""
        # The dry backward writes into its gradient too, so that is restored after the run.
        self.strangers.append((stranger, stranger.grad))
        if stranger.grad is not None:
            self.ledger.announce(stranger.grad, Category.GRADIENT, known=not is_unbacked(stranger.grad))

    def forget_imports(self) -> None:
        """Free the reference cycles that an import within the step leaves behind."""
        # Importing dynamo leaves cycles of frames and exceptions. They hold the frames that called the import, with
        # activations among their locals: the first dry run of a process was 4 MB too high (notes/).
        if len(sys.modules) != self._imported:
            gc.collect(0)  # the youngest generation holds all that the import made; a full collection takes 0.17 s
            self._imported = len(sys.modules)

    def leaves_something(self) -> bool:
        """True if the recorded step kept a tensor beside gradients, or changed the model beside its trained weights.

        A later step may then differ from it: it finds a cache, or values that only a first step computes.
        """
        if self.ledger.has_left() or self.lasting is None or self.lasting.attributes.changed():
            return True
        cells = [(self.ledger.cell_of(t), t) for tensor in self.lasting.tensors for t in memory_of(tensor)]
        return any(
            cell is not None and (cell.index in self.originals or cell.known is is_unbacked(t)) for cell, t in cells
        )

    def is_cheap(
        self, func: Any, traits: Traits, inputs: Sequence[torch.Tensor], args: tuple, kwargs: dict, key: Any
    ) -> bool:
        """True if a call with known inputs is computed for real: all integer, or small."""
        if func in NEVER_COMPUTED:
            return False  # CUDA's operators, of which a CPU has no kernel
        if simulation.of_cuda and is_foreign(traits, func):
            return False
        if func in ASKING:
            return True  # it returns a number, which a branch may depend on
        if inside.operator and not self.is_small(func, args, kwargs, key):
            return False  # attention's triangle of 4096 x 4096: 45 ms in every layer, and nothing can branch on it
        if inputs and not any(t.is_floating_point() or t.is_complex() for t in inputs):
            return traits.returns_written or not self.is_vast(func, args, kwargs, key)
        if any(t.numel() > KNOWN_LIMIT for t in inputs):
            return False
        if traits.is_random and not inputs:
            return all(shape.numel <= MOST_DRAWN for shape in shapes_in(self.shapes(func, args, kwargs, key)))
        # Outputs too: an outer product of small vectors is large. Integers that an optimizer makes are its states in
        # few bits, up to a byte a parameter, and nothing branches on them.
        integers_too = self.phase is Phase.OPTIMIZER
        return all(
            not shape.is_vast
            if not (shape.dtype.is_floating_point or shape.dtype.is_complex or integers_too)
            else shape.numel <= KNOWN_LIMIT
            for shape in shapes_in(self.shapes(func, args, kwargs, key))
        )

    def is_small(self, func: Any, args: tuple, kwargs: dict, key: Any) -> bool:
        return all(shape.numel <= KNOWN_LIMIT for shape in shapes_in(self.shapes(func, args, kwargs, key)))

    def is_vast(self, func: Any, args: tuple, kwargs: dict, key: Any) -> bool:
        """True if an integer operator's results are too large to compute, such as a mask of 1M x 1M tokens."""
        if torch.Tag.dynamic_output_shape in func.tags:
            return False  # its results depend on its inputs, which are known
        try:
            shapes = self.shapes(func, args, kwargs, key)
        except TraceError:
            return False  # no meta kernel: only the operator itself knows its shapes
        return any(shape.is_vast for shape in shapes_in(shapes))

    def compute(self, traits: Traits, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run the operator for real. Memory of the user's that it overwrites is saved first, and restored later."""
        for target in instances(torch.Tensor, written_arguments(traits, args, kwargs)):
            self.keep_original(target)
        faults.operator = traits.name
        try:
            with one_thread():
                return func(*args, **kwargs)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) and simulation.of_cuda and not traits.written:
                return _in_floating_point(func, args, kwargs)  # `torch.histc` of integers, which counts experts' tokens
            if "can't allocate memory" not in str(error):
                raise
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: this machine has no room for its "
                "results, which a dry run computes because the step may branch on them: use a smaller batch"
            ) from error
        finally:
            faults.operator = None

    def keep_original(self, target: torch.Tensor) -> None:
        cell = self.see(target)
        if self.ledger.entries[cell.index].operator is None and cell.index not in self.originals:
            with torch.no_grad():
                alias = target.detach()
                self.originals[cell.index] = (alias, alias.clone())

    def drop_original(self, tensor: torch.Tensor) -> None:
        """Do not restore a tensor, which ends with the dry run, and do not keep its memory."""
        cell = self.ledger.cell_of(tensor)
        if cell is not None:
            self.originals.pop(cell.index, None)

    def imagine(self, traits: Traits, func: Any, args: tuple, kwargs: dict, key: Any) -> Any:
        """The operator's results as tensors without memory."""
        if traits.returns_written:
            targets = written_arguments(traits, args, kwargs)
            # In place: no new storage, but the content of the targets is unknown from here on.
            for target in instances(torch.Tensor, targets):
                self.see(target).known = False
            returns = len(func._schema.returns)
            return None if returns == 0 else targets[0] if returns == 1 else tuple(targets[:returns])
        shapes = self.shapes(func, args, kwargs, key)
        if func in COUNTED and kwargs.get("output_size") is None:
            self.questions.note(f"the number of results of {func}", COUNTED[func], moves_peak=True)
        out = unbacked_tensors(shapes)
        if traits.name in _CHOOSING:
            out = self.choose(func, args, out)
        if traits.name in _RESIZED_IN_PLACE:
            out = in_kept_memory(func, out, args)
            set_unbacked(out)
        return out

    def without_masks(self, args: tuple) -> tuple:
        """Replace masks among an index by the places where they are true. An unknown mask is assumed true everywhere,
        the worst case.
        """

        def places(index: Any) -> list[Any]:
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                return [index]
            if not self.see(index).known:
                self.questions.note("where a computed mask is true", "everywhere", moves_peak=True)
                if index.numel() * index.dim() * 8 > LARGEST_INTEGERS:
                    # The places themselves would take gigabytes. Only their shape matters.
                    return [TensorShape((index.numel(),), (index.dim(),), torch.int64).unbacked()] * index.dim()
                index = torch.ones(index.shape, dtype=torch.bool)
            elif self.see(index).drawn:
                self.reads_draws = True
            return list(index.nonzero().unbind(1))

        return (args[0], [place for index in args[1] for place in places(index)], *args[2:])

    def with_lengths(self, func: Any, args: tuple) -> tuple:
        """Replace lengths on which the results' sizes depend by numbers. Unknown lengths are assumed to be 0."""

        def numbers(tensor: torch.Tensor) -> list[int]:
            cell = self.see(tensor)
            if cell.known:
                self.reads_draws |= cell.drawn
                return tensor.tolist()
            self.questions.note(f"the lengths given to {func}", "0", moves_peak=True)
            return [0] * tensor.numel()

        return tuple(
            numbers(a) if i in LENGTHS[func] and isinstance(a, torch.Tensor) else a for i, a in enumerate(args)
        )

    def shapes(self, func: Any, args: tuple, kwargs: dict, key: Any) -> Any:
        if func in _MAKES_NESTED or any(tensor.is_nested for tensor in instances(torch.Tensor, args)):
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: nested tensors of the layout "
                "strided (attention over jagged ones makes them on a CPU) have no shapes without data: pad them with "
                "torch.nested.to_padded_tensor and pass a mask, or pack them in one row with cu_seqlens"
            )
        try:
            return result_shapes(func, args, kwargs, key, self.is_known_number)
        except NotImplementedError as error:
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: PyTorch cannot infer its results' "
                "shapes without data: use another operator there, or register one with torch.library.register_fake"
            ) from error
        except RuntimeError as error:
            raise TraceError(
                f"{func} cannot be run dry in {self.modules.current or 'the step'}: {str(error).splitlines()[0]}: "
                "does the step run without a plan?"
            ) from error

    def is_known_number(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 0 and self.see(tensor).known

    def launched(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Enter the launch of a kernel that PyTorch does not know. It allocates nothing and computes nothing."""
        cells = [self.see(tensor) for tensor in tensors]
        index = self.begin(tensors)
        reads, makes = tuple(cell.value for cell in cells), []
        for tensor, cell in zip(tensors, cells, strict=True):
            fresh = self.is_as_allocated(cell)
            if fresh:
                makes.append(self.ledger.new_value(cell, index))
            # Which tensors a kernel writes is unknown. Integers that were computed are what it reads: lengths, labels.
            # Those that were only allocated, and all floating-point numbers, may be its results.
            if fresh or tensor.is_floating_point():
                cell.known = False
        self.note_seconds(name)
        self.note(name, self.cost(name, list(map(TensorShape.of, tensors)), [], ()), reads=reads, makes=tuple(makes))

    def is_as_allocated(self, cell: Cell) -> bool:
        """True if a storage still holds what the operator that allocated it left there: nothing, or one number."""
        made = self.ledger.entries[cell.index].operator
        if made is None or self.ledger.values[cell.value].operator != made:
            return False
        return self.operators[made].name.split(".")[1] in _ALLOCATING

    def note_seconds(self, name: str) -> None:
        self.questions.note(f"the time of the kernel {name}", "that of moving the bytes of its tensors once")

    def choose(self, func: Any, args: tuple, out: Any) -> Any:
        """The results of a choice (`topk`, `argmax`, ...) with assumed indexes."""

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != torch.int64 or TensorShape.of(tensor).is_vast:
                return tensor
            # Real indexes, because the model counts them: experts run on as many tokens as were routed to them.
            indexes = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return indexes.copy_(assumed_choice(self.routing, tensor.shape, choice_bound(func, args)))

        self.questions.note(str(func), self.routing.value, moves_peak=True)
        return map_instances(torch.Tensor, chosen, (out,))[0]

    def restore(self) -> None:
        """Restore memory that was overwritten for real, and the gradients of parameters outside of the model."""
        for stranger, gradient in self.strangers:
            stranger.grad = gradient
        with torch.no_grad():
            for alias, content in self.originals.values():
                alias.copy_(content)


# By name: Python hashes a text once, and an operator at each look-up.
_INDEXING, _LENGTHS, _CHOOSING, _RESIZED_IN_PLACE = (
    frozenset(map(str, operators)) for operators in (INDEXING, LENGTHS, CHOOSING, RESIZED_IN_PLACE)
)

_ZEROS = torch.ops.aten._efficientzerotensor.default  # a tangent of zeros: it has no memory, and PyTorch branches on it

_MAKES_NESTED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_nested_tensor_from_tensor_list", "_nested_view_from_buffer", "_nested_from_padded")
)

_COMPOSED_ON_CPU = frozenset({"aten._chunk_cat.default", "aten._chunk_cat.out"})  # CUDA has a kernel of its own

# Operators that allocate a tensor, and at most fill it with one number.
_ALLOCATING = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "zeros", "zeros_like"}
    | {"new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full"}
)


def running() -> DryRun | None:
    """The dry run that is active in this thread."""
    return next((mode for mode in active_modes() if isinstance(mode, DryRun)), None)


_foreign: dict[str, bool] = {}


def is_foreign(traits: Traits, func: Any) -> bool:
    """True if an operator is of a package with its own kernels for CUDA: only its fake kernel can run here."""
    found = _foreign.get(traits.name)
    if found is None:
        name = func._schema.name
        ours = func.namespace in ("aten", "prims", "prim", "profiler", "tightfit")
        found = _foreign[traits.name] = not ours and (is_custom_operator(name) or not runs_with(name, "CPU"))
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which operators use one thread."""
    # Only small operators run for real. Waking other threads, which then spin while they wait, took 1.0 of the 2.6 s of
    # an 8B's dry run (notes/).
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def asks_for_shapes(args: tuple, kwargs: dict) -> bool:
    """True if an operator works on the device meta, where nothing has memory or numbers: somebody asks for shapes.

    Forward-mode differentiation does, for sums with a tangent of zeros (`maybe_add_maybe_sub`, native/BinaryOps.cpp).
    """
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in args)


def _in_floating_point(func: Any, args: tuple, kwargs: dict) -> Any:
    """Results on integers of an operator whose CPU kernel takes none, as its CUDA kernel does."""
    integers = {t.dtype for t in instances(torch.Tensor, args) if not t.is_floating_point()}

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype in integers else tensor

    found = func(*map_instances(torch.Tensor, converted, args), **kwargs)
    (dtype,) = integers
    return found.to(dtype)


def unbacked_tensors(shapes: Any) -> Any:
    """An operator's results, with a tensor without memory for each shape among them."""
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
