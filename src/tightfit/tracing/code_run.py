"""Runs any code dry, not only training steps, and records it. Everything that the code can reach is restored after it.

Its tensors are the user's own. The parts of a step that occur in it are found by themselves: what autograd's engine
runs is backward, what runs between the beginning and the end of an optimizer's step is the optimizer, and all else is
forward.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tightfit.errors import InputError
from tightfit.memory.allocator import collector_off, memory_of, scales_of
from tightfit.optim.by_name import host_states, named_states
from tightfit.optim.in_backward import gradient_memory
from tightfit.runtime.internals import (
    at_end_of_backward,
    current_node,
    inference_mode_as_no_grad,
    set_version_counters,
)
from tightfit.runtime.module_paths import plain_tensors_of
from tightfit.runtime.operators import Traits
from tightfit.runtime.outside import outside_training
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import MIN_BLOCK
from tightfit.tracing.cuda.products import takes_workspace
from tightfit.tracing.cuda.replay import as_allocated
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.host import on_host
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.questions import Answers
from tightfit.tracing.reached import Reached
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.tracing.recording import OperatorCost, no_cost
from tightfit.tracing.repeated import label_states
from tightfit.tracing.restore import Contents, generators_restored
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import record
from tightfit.tracing.surroundings import operators_simulated, running_dry
from tightfit.tracing.twin import memory_given
from tightfit.tracing.unbacked import is_unbacked
from tightfit.tracing.workspace import cpu_workspace

aten = torch.ops.aten


class CodeRun(DryRun):
    """The dispatch mode under which any code runs dry."""

    def __init__(
        self, ledger: Ledger, modules: ModuleTracker, cost: OperatorCost, role: CudaRole | None, answers: Answers | None
    ):
        super().__init__(ledger, modules, cost, cpu_workspace if role is None else role.workspace, answers=answers)
        self.role = role
        self.stepping = 0  # depth of optimizers' steps
        self.parameters: dict[Tensor, str] = {}  # with their names
        self.optimizers: list[torch.optim.Optimizer] = []
        self.first_steps: list[torch.optim.Optimizer] = []  # that made their states and have not begun another step
        self.existing: list[int] = []  # storages that the code found, in the order in which it first used them
        self._in_backward = False
        self._handles: dict[bool, Tensor] = {}  # workspaces of cuBLAS: of forward's thread, and of backward's

    def begin(self, inputs: Sequence[Tensor]) -> int:
        """Find the phase of the operator that begins."""
        if current_node() is not None:
            self.phase = Phase.BACKWARD
            if not self._in_backward:
                self._in_backward = True
                at_end_of_backward(self.backward_ends)
        else:
            self.phase = Phase.OPTIMIZER if self.stepping else Phase.FORWARD
            self._in_backward = False  # a backward that raised has no end
        return super().begin(inputs)

    def view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is aten.lift_fresh.default and self.ledger.cell_of(args[0]) is None:
            # `torch.tensor` allocates without an operator, and this view is all that a mode sees of it.
            cell = self.ledger.track(args[0], known=True, operator=len(self.operators), forward=True)
            self.ledger.entries[cell.index].born = len(self.operators)
        return super().view(func, args, kwargs)

    def see(self, tensor: Tensor) -> Any:
        is_new = self.ledger.cell_of(tensor) is None
        cell = super().see(tensor)
        if is_new:
            self.existing.append(cell.index)
        return cell

    def finish(self, traits: Traits, *rest: Any) -> None:
        thread = current_node() is not None
        if self.role is not None and thread not in self._handles and takes_workspace(traits.name):
            # No operator shows it. A training step's dry run counts both from the beginning: a process that trains has
            # had products in both threads. Other code may have none in one of them.
            memory = TensorShape((self.role.held_by_a_thread,), (1,), torch.uint8).unbacked()
            self.ledger.track(memory, known=False, operator=self.ledger.now)
            self.ledger.label(memory, Category.WORKSPACE)
            self._handles[thread] = memory
        super().finish(traits, *rest)

    def backward_ends(self) -> None:
        """Label the gradients, before the code sets them to None."""
        self._in_backward = False
        for parameter, name in self.parameters.items():
            gradient = gradient_memory(parameter)
            if gradient is not None:
                self.ledger.label(gradient, Category.GRADIENT, name)

    def step_begins(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self.stepping += 1
        if optimizer in self.first_steps:
            self.first_steps.remove(optimizer)
        elif not optimizer.state:
            self.first_steps.append(optimizer)

    def step_ends(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self.stepping -= 1
        label_states(self, self.parameters, optimizer, on_cuda=self.role is not None)

    def states_made(self) -> int:
        """Bytes of optimizers' states that the code made in its last step: a later one would begin with them."""
        made = [state for optimizer in self.first_steps for _, _, state in named_states(optimizer)]
        on_host = [state for optimizer in self.first_steps for state in host_states(optimizer)] if self.role else []
        return sum(state.nbytes for state in made) - sum(state.nbytes for state in on_host)

    def trace(self) -> StepTrace:
        """The trace of the code so far. Raises `InputError` if it ran no operator."""
        if not self.operators:
            raise InputError("the traced code ran no operator of PyTorch, so there is nothing to predict")
        self.settle_sum()
        for index in self.existing:
            # Memory that the code found existed from the beginning, whenever it was first used.
            entry = self.ledger.entries[index]
            if entry.operator is None and entry.died is None:
                for time in range(entry.born):
                    self.levels[time] += entry.bytes
                    self.starts[time] += entry.bytes
                entry.born = 0
        self.existing.clear()
        found = record(self, [0, len(self.operators)], repeats=1)
        return found if self.role is None else as_allocated(found, once=True)


@contextmanager
def code_run_dry(
    reached: Reached, cost: OperatorCost = no_cost, role: CudaRole | None = None, answers: Answers | None = None
) -> Iterator[CodeRun]:
    """A context whose operators run dry on the user's own tensors.

    Afterwards everything in `reached` is as before: weights, buffers, gradients, optimizers' states, attributes,
    containers, random states. With a `role`, CPU tensors simulate a CUDA device. Raises `InputError` inside of another
    dry run.
    """
    if simulation.is_dry:
        raise InputError("trace runs inside of another dry run, which records already: trace one of them")
    ledger = Ledger(rounding=1 if role is None else MIN_BLOCK)
    modules = dict(reached.paths_and_modules())
    parameters, buffers, plain = _module_tensors(modules)
    states = [state for optimizer in reached.optimizers for _, _, state in named_states(optimizer)]
    owned = [p for o in reached.optimizers for group in o.param_groups for p in group["params"]]
    held, others = [*parameters, *buffers, *plain], [*owned, *states, *reached.tensors]
    with (
        outside_training(),
        inference_mode_as_no_grad(),
        memory_given(held, others, modules.values()),
        _restored(reached, list(modules.values()), [*held, *others]),
        on_host([*held, *others]),
        ModuleTracker(nn.Module()) as tracker,
        collector_off(),
    ):
        tracker.paths = {id(module): path for path, module in modules.items()}
        dry = CodeRun(ledger, tracker, cost, role, answers)
        dry.parameters = {**dict.fromkeys(owned, ""), **parameters}
        dry.optimizers = reached.optimizers
        with running_dry(dry):
            _announce(dry, parameters, buffers, plain)
            for optimizer in reached.optimizers:
                for _, _, state in named_states(optimizer):
                    ledger.announce(state, Category.OPTIMIZER_STATE, known=not is_unbacked(state))
                label_states(dry, dry.parameters, optimizer, on_cuda=role is not None)
            for tensor in (*owned, *reached.tensors):
                for part in memory_of(tensor):
                    ledger.announce(part, Category.INPUT, known=not is_unbacked(part))
            with operators_simulated(dry, role), _steps_followed(dry):
                yield dry


def _module_tensors(modules: dict[str, nn.Module]) -> tuple[dict[Tensor, str], dict[Tensor, str], list[Tensor]]:
    """The parameters and buffers of modules with their names, and the tensors in plain attributes, each once."""
    parameters: dict[Tensor, str] = {}
    buffers: dict[Tensor, str] = {}
    plain: list[Tensor] = []
    for path, module in modules.items():
        for name, parameter in module.named_parameters(recurse=False):
            parameters.setdefault(parameter, f"{path}.{name}".strip("."))
            plain += scales_of(parameter)
        for name, buffer in module.named_buffers(recurse=False):
            buffers.setdefault(buffer, f"{path}.{name}".strip("."))
        plain += [tensor for _, tensors in plain_tensors_of(module) for tensor in tensors]
    return parameters, buffers, plain


def _announce(dry: CodeRun, parameters: dict[Tensor, str], buffers: dict[Tensor, str], plain: list[Tensor]) -> None:
    """Enter what the modules hold when the code begins, and the gradients of all parameters."""
    ledger = dry.ledger
    for parameter, name in parameters.items():
        for part in memory_of(parameter):
            known = not parameter.requires_grad and not is_unbacked(part)  # code may train the others
            ledger.announce(part, Category.PARAMETER, known=known, name=name)
    for tensor, name in [*buffers.items(), *((tensor, "") for tensor in plain)]:
        for part in memory_of(tensor):
            ledger.announce(part, Category.PARAMETER, known=not is_unbacked(part), name=name)
    for parameter, name in dry.parameters.items():
        gradient = parameter.grad
        if type(gradient) is Tensor and gradient.layout is torch.strided:
            # A stand-in, which is freed when the code sets it to None: the gradient itself is kept, to be put back.
            parameter.grad = TensorShape.of(gradient).unbacked()
            ledger.track(parameter.grad, known=False, operator=None)
            ledger.label(parameter.grad, Category.GRADIENT, name)


@contextmanager
def _steps_followed(dry: CodeRun) -> Iterator[None]:
    """A context in which the dry run knows when an optimizer steps."""
    handles = [register_optimizer_step_pre_hook(dry.step_begins), register_optimizer_step_post_hook(dry.step_ends)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restored(reached: Reached, modules: list[nn.Module], tensors: list[Tensor]) -> Iterator[None]:
    """A context after which everything that the code reached is as before, except the data of tensors.

    The dry run restores the data that it writes.
    """
    held = [*(module.__dict__ for module in modules), *(o.__dict__ for o in reached.optimizers), reached.values]
    contents = Contents(held)
    plain = [t for t in tensors if type(t) in (Tensor, nn.Parameter)]
    memory = [(t, t.detach()) for t in plain]
    leaves = [(t, t.requires_grad, t.grad) for t in plain if t.is_leaf]
    counted = [t for t in plain if not t.is_inference()]
    versions = [t._version for t in counted]
    with generators_restored():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in memory:
                    if _has_other_memory(tensor, before):  # `model.half()`, `tensor.data = ...`
                        tensor.data = before
            for tensor, requires_grad, gradient in leaves:
                if tensor.requires_grad is not requires_grad:
                    tensor.requires_grad_(requires_grad)
                tensor.grad = gradient
            contents.restore()
            reached.put_names_back()
            set_version_counters(counted, versions)


def _has_other_memory(tensor: Tensor, before: Tensor) -> bool:
    def where(item: Tensor) -> tuple[Any, ...]:
        return item.device, item.data_ptr(), item.dtype, item.shape, item.stride()

    return where(tensor) != where(before)
