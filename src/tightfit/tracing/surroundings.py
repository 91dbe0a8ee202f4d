"""The surroundings of a dry run: what exists before it, who answers in it, and that all is as before after it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from tightfit.levers.activity import activity
from tightfit.memory.allocator import collector_off, memory_of, scales_of
from tightfit.runtime.internals import forget_interrupted_backward, notice_compiled_calls
from tightfit.runtime.module_paths import plain_tensors_of, registered_modules
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.outside import outside_training
from tightfit.runtime.simulation import simulation
from tightfit.step import Part, StepSettings
from tightfit.tracing.compiled_code import compiled_code_simulated
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import MIN_BLOCK
from tightfit.tracing.cuda.flash_package import ATTENTION_OF_OTHERS
from tightfit.tracing.cuda.products import HANDLE_WORKSPACE, THREADS_WITH_PRODUCTS
from tightfit.tracing.cuda.replacements import Replacements
from tightfit.tracing.dry_run import DryRun, Lasting
from tightfit.tracing.faults import faults
from tightfit.tracing.host import on_host
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.outcomes import Generators
from tightfit.tracing.questions import answers_of
from tightfit.tracing.random_states import random_states_counted
from tightfit.tracing.reading import reads_answered
from tightfit.tracing.reassigned import memory_given_back
from tightfit.tracing.record import Category
from tightfit.tracing.recording import ExecutorCost, OperatorCost
from tightfit.tracing.resizing import resizes_followed
from tightfit.tracing.restore import everything_restored, reach_restored
from tightfit.tracing.rules import Routing
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.streams import moves_simulated
from tightfit.tracing.unbacked import is_unbacked
from tightfit.tracing.workspace import cpu_workspace

# What code of others looks up in a dry run. Dynamo may be imported by the step itself.
_OTHERS = Replacements(
    {**ATTENTION_OF_OTHERS, "torch._dynamo.eval_frame": lambda module, replacements: notice_compiled_calls()}
)


class Rank(Protocol):
    """One process of several, which a dry run simulates (`ranks`)."""

    @property
    def steps(self) -> int:
        """The number of the step whose memory is that of every later one."""
        ...

    @property
    def reduces_once(self) -> bool:
        """True if gradients are added up in the last micro-batch only."""
        ...

    @property
    def is_on_host(self) -> bool:
        """True if its weights, gradients and states are in the host's memory between forward and backward."""
        ...

    def simulated(self) -> AbstractContextManager[Any]:
        """A context in which this process is that rank."""
        ...

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model as the rank holds it. It may change the model, which nobody else has."""
        ...


@contextmanager
def dry_run_of(
    model: nn.Module,
    parts: Sequence[Part],
    cost: OperatorCost,
    executor: ExecutorCost,
    role: CudaRole | None,
    routing: Routing = Routing.BALANCED,
    beside: Sequence[nn.Module] = (),
    rank: Rank | None = None,
    settings: StepSettings | None = None,
    loss: Any = None,
) -> Iterator[DryRun]:
    """A context with a dry run that has not begun yet. Everything that it touches is restored afterwards, also what the
    loss reaches beside the model.

    `beside` are modules that the loss runs, whose weights exist before the step and after it. With `settings` of fp16,
    `torch.amp.GradScaler` has two numbers on a card. The model of a `rank` is not restored, and its parameters are not
    announced: the rank wraps it first, and may free them.
    """
    batch = list(tensors_in([part.batch for part in parts]))
    ledger = Ledger(rounding=1 if role is None else MIN_BLOCK)
    if role is not None:  # cuBLAS keeps its workspaces from the first product on, and no operator shows them
        for _ in range(THREADS_WITH_PRODUCTS):
            ledger.reserve(role.held_by_a_thread, Category.WORKSPACE, HANDLE_WORKSPACE)
    named_plain = named_plain_tensors(model)
    plain = [tensor for _, tensor in named_plain]
    lasting = model if rank is None else nn.Module()
    everything = [*lasting.parameters(), *model.buffers(), *plain, *batch, *held_by(beside)]
    with (
        outside_training(),
        torch.inference_mode(False),  # the caller may be in inference mode; the step is a training step
        torch.enable_grad(),
        everything_restored(lasting, *batch, *plain) as attributes,
        reach_restored(loss, model),
        ExitStack() as restored,
        on_host(everything),
        ModuleTracker(model) as modules,
        collector_off(),
    ):
        dry = DryRun(
            ledger,
            modules,
            cost,
            cpu_workspace if role is None else role.workspace,
            routing,
            executor,
            answers_of(model),
        )
        with running_dry(dry):
            for module in beside:
                restored.enter_context(everything_restored(module))
            announce(ledger, lasting, batch, named_plain)
            dry.generators = Generators(attributes)
            dry.begin_draws()
            if role is not None and settings is not None and settings.precision == "fp16":
                dry.loss_scale = TensorShape((), (), torch.float32).unbacked()
                ledger.announce(dry.loss_scale, Category.WORKSPACE, known=False, name="scale of the loss")
                ledger.reserve(MIN_BLOCK, Category.WORKSPACE, "steps since the loss scale grew")
            dry.lasting = Lasting(attributes, [t for t in everything if not t.requires_grad])
            for module in beside:
                announce(ledger, module, [], named_plain_tensors(module))
            with (
                operators_simulated(dry, role, model),
                _watching_saves(ledger),
                nullcontext() if rank is None else resizes_followed(dry),
                memory_given_back(dry) if rank is None else rank.simulated(),
            ):
                yield dry


@contextmanager
def running_dry(dry: DryRun) -> Iterator[None]:
    """A context in which this process runs dry. The memory that was written for real is as before at its end."""
    dry.modules.operators = dry.operators
    with faults.raised():
        simulation.is_dry = True
        try:
            yield
        except BaseException:
            forget_interrupted_backward()
            raise
        finally:
            simulation.is_dry = False
            dry.restore()
            dry.ledger.close()


@contextmanager
def operators_simulated(dry: DryRun, role: CudaRole | None, model: nn.Module | None = None) -> Iterator[None]:
    """A context in which the dry run answers all operators, in the place of a card and of the levers' own work too."""
    with (
        nullcontext() if role is None else role.simulated(),
        _OTHERS.active(),
        dry,
        filling_off(),
        reads_answered(dry),
        random_states_counted(dry),
        moves_simulated(dry, model),
        compiled_code_simulated(dry),
    ):
        yield


def announce(
    ledger: Ledger, model: nn.Module, batch: Sequence[torch.Tensor], plain: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Enter the tensors that exist before the step. `plain` are those that modules hold as plain attributes."""
    names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    for tensor in in_order_of_moving(model):
        # `Params4bit.to` of bitsandbytes moves scales before codes.
        for held in (*scales_of(tensor), *memory_of(tensor)) if isinstance(tensor, nn.Parameter) else (tensor,):
            known = not tensor.requires_grad and not is_unbacked(held)  # the optimizer changes trained weights
            ledger.announce(held, Category.PARAMETER, known=known, name=names.get(id(tensor), ""))
    for name, tensor in plain:
        ledger.announce(tensor, Category.PARAMETER, known=not is_unbacked(tensor), name=name)
    for tensor in batch:
        ledger.announce(tensor, Category.INPUT, known=not is_unbacked(tensor))


def in_order_of_moving(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which `model.to(device)` allocates them (`nn.Module._apply`)."""
    return _moved(model, {None})


def _moved(module: nn.Module, seen: set[nn.Module | torch.Tensor | None]) -> Iterator[torch.Tensor]:
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _moved(child, seen)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor not in seen:
            seen.add(tensor)
            yield tensor


def held_by(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The parameters, buffers and plain tensors of modules."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers(), *plain_tensors(module))]


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes, in containers too, and the scales of quantised weights."""
    return [tensor for _, tensor in named_plain_tensors(model)]


def named_plain_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The same, with the path of the attribute, or the name of the weight."""
    held = [
        (f"{path}.{name}".lstrip("."), tensor)
        for path, module in registered_modules(model)
        for name, tensors in plain_tensors_of(module)
        for tensor in tensors
    ]
    scales = [(f"{name} scale", leaf) for name, weight in model.named_parameters() for leaf in scales_of(weight)]
    return held + scales


@contextmanager
def _watching_saves(ledger: Ledger) -> Iterator[None]:
    """Note which values autograd saves inside observed blocks."""

    def saved(tensor: Any) -> None:
        cell = ledger.cell_of(tensor)
        if cell is not None:
            ledger.values[cell.value].saved = True

    activity.on_save = saved
    try:
        yield
    finally:
        activity.on_save = None


@contextmanager
def filling_off() -> Iterator[None]:
    """A context without PyTorch's filling of new memory in deterministic mode."""
    # Filling would write into tensors without memory, and end the process.
    setting: Any = torch.utils.deterministic  # its module object defines the attribute; the stub does not know it
    before = setting.fill_uninitialized_memory
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        setting.fill_uninitialized_memory = before
