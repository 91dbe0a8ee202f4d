"""Records a real training step: every storage from its allocation to its release.

The bookkeeping is that of the dry run. The only difference is that operators compute.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tightfit.memory.failure import parse_out_of_memory
from tightfit.optim.by_name import named_states
from tightfit.optim.in_backward import gradient_memory
from tightfit.runtime.internals import current_node, has_kernel, is_profiling, run_composite
from tightfit.runtime.operators import Traits, traits_of
from tightfit.runtime.outside import OutsideLoop
from tightfit.tracing.ledger import Cell, Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.record import Category, OperatorRecord, Phase, StepTrace, StorageRecord
from tightfit.tracing.recording import Call, Recording, answers_itself
from tightfit.tracing.shapes import inputs_and_key
from tightfit.tracing.step import record

CUDA_ROUNDING = 512  # kMinBlockSize, c10/cuda/CUDACachingAllocator.h


class RealLedger(Ledger):
    """A ledger for storages of the user's, which it does not keep alive.

    Storages on other devices than the observed one count zero bytes.
    """

    def __init__(self, device: torch.device):
        # Other ledgers attach cells to the same storages: a dry run, another monitor. So each has its own attribute. A
        # cell keeps its ledger alive, so no two ledgers have the same id.
        super().__init__(rounding=CUDA_ROUNDING if device.type == "cuda" else 1, key=f"_tightfit_watch_{id(self)}")
        self.device = device
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []

    def track(self, tensor: torch.Tensor, *, known: bool, operator: int | None, forward: bool = False) -> Cell:
        cell = self.cell_of(tensor)
        if cell is None:
            cell = super().track(tensor, known=known, operator=operator, forward=forward)
            self.seen.append(weakref.ref(tensor.untyped_storage()))
            if tensor.device.type != self.device.type:
                self.live_bytes -= self.entries[cell.index].bytes
                self.entries[cell.index].bytes = 0
        return cell

    def enter(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Set the category of a tensor. Enter it first if it is new."""
        self.track(tensor, known=True, operator=None)
        self.label(tensor, category, name)

    def begin_again(self) -> None:
        super().begin_again()
        self.seen = [reference for reference in self.seen if reference() is not None]

    def close(self) -> None:
        super().close()
        for reference in self.seen:
            storage = reference()
            if storage is not None:
                self.take_off(storage)
        self.seen.clear()


class WatchedModules(ModuleTracker):
    """Tracks the running module by hooks on the observed modules. `models` maps prefixes of paths to models."""

    # Not by global hooks, which would affect compiled models.

    def __init__(self, models: Mapping[str, nn.Module], outside: OutsideLoop):
        super().__init__(nn.Module())
        self.outside = outside
        self.modules = [module for model in models.values() for module in model.modules()]
        for prefix, model in models.items():
            self.paths |= {id(module): f"{prefix}{path}".rstrip(".") for path, module in model.named_modules()}

    def __enter__(self) -> "WatchedModules":
        for module in dict.fromkeys(self.modules):
            self.handles.append(module.register_forward_pre_hook(self._enter))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not self.outside:
            super()._enter(module, args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.outside:
            super()._leave(module, args, output)


class RealRun(Recording):
    """The dispatch mode that records a real step. It does not change what is computed.

    The monitor sets `phase`. `on_backward` is called at the first operator that autograd's engine runs. The mode
    records nothing while it is `passive`, and nothing of code outside of the training.
    """

    def __init__(
        self, device: torch.device, modules: ModuleTracker, on_backward: Callable[[], None], outside: OutsideLoop
    ):
        self.ledger: RealLedger
        super().__init__(RealLedger(device), modules)
        self.device = device
        self.outside = outside
        self.on_backward = on_backward
        self.passive = False
        self.failed_at: int | None = None  # the operator that ran out of memory
        self._took = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(map(answers_itself, types)):
            return NotImplemented  # the class runs its own operators, which come here one by one
        if self.passive or self.outside:
            return func(*args, **kwargs)
        if self.phase is not Phase.BACKWARD and current_node() is not None:
            # A loss made outside of the model runs backward operators before the hooks on the model's results run.
            self.on_backward()
        traits = traits_of(func)
        if traits.is_composite and not has_kernel(func.name(), self.device.type.upper()):
            with self:
                return run_composite(func, args, kwargs)
        if traits.is_view:
            return self.view(func, args, kwargs)
        inputs, key = inputs_and_key(func, args, kwargs)
        reads = tuple(self.see(tensor).value for tensor in inputs)
        index = self.begin(inputs)
        began = time.perf_counter()
        try:
            out = func(*args, **kwargs)
        except BaseException as error:
            self.fail(traits, reads, error)
            raise
        self._took = time.perf_counter() - began
        makes = self.account(traits, args, kwargs, out, index, known=True)
        self.finish(traits, inputs, Call(func, args, kwargs), out, key, reads, makes)
        return out

    def without_hooks(self) -> AbstractContextManager[None]:
        """A context without this run's hooks on modules, in which captured blocks are recorded."""
        return self.modules.paused() if self.modules.handles else nullcontext()  # none: the monitor has ended

    def see(self, tensor: torch.Tensor) -> Cell:
        return self.ledger.track(tensor, known=True, operator=None, forward=self.phase is Phase.FORWARD)

    def priced(
        self, traits: Traits, inputs: Sequence[torch.Tensor], call: Call, out: Any, key: Any
    ) -> tuple[float, int]:
        """The measured seconds, and the scratch memory that no dispatch mode sees."""
        # Some of these figures are measured with a profiler, and only one profiler can run at a time.
        if self.device.type != "cpu" or is_profiling():
            return self._took, 0
        return self._took, super().priced(traits, inputs, call, out, key)[1]

    def fail(self, traits: Traits, reads: tuple[int, ...], error: BaseException) -> None:
        """Enter the operator that raised. For an out-of-memory error, its requested bytes count as scratch memory."""
        out_of_memory = parse_out_of_memory(str(error))
        wanted = 0 if out_of_memory is None else out_of_memory.requested_bytes or 0
        self.levels.append(self.ledger.live_bytes + wanted)
        self.operators.append(
            OperatorRecord(
                traits.name, self.phase, self.modules.attribute(self.phase)[0], 0.0, wanted, None, -1, reads, (), False
            )
        )
        if out_of_memory is not None:
            self.failed_at = len(self.operators) - 1
            self.passive = True  # memory that the exception frees on its way is no part of the step

    # Categories of storages

    def enter_model(self, model: nn.Module, prefix: str = "") -> None:
        """Enter parameters, buffers and existing gradients of a model."""
        for name, parameter in model.named_parameters():
            self.ledger.enter(parameter, Category.PARAMETER, prefix + name)
            gradient = gradient_memory(parameter)
            if gradient is not None:
                self.ledger.enter(gradient, Category.GRADIENT, prefix + name)
        for name, buffer in model.named_buffers():
            self.ledger.enter(buffer, Category.PARAMETER, prefix + name)

    def enter_states(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """Enter the optimizer's states. `names` are the names of the parameters."""
        for parameter, key, state in named_states(optimizer):
            self.ledger.enter(state, Category.OPTIMIZER_STATE, f"{names.get(parameter, '')} {key}".strip())

    def step_trace(self) -> StepTrace:
        """The trace of the step so far."""
        return record(self, [0, len(self.operators)], repeats=1)


_OWNED = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER_STATE)


def bytes_by_module(trace: StepTrace) -> dict[str, int]:
    """Bytes in use at the peak, by module path, the largest first. They add up to the peak.

    A parameter, its gradient and its states belong to the parameter's module. Other storages belong to the module that
    allocated them, and scratch memory to the running one.
    """
    index = trace.peak_index
    totals: dict[str, int] = {}
    for storage in trace.alive_at(index):
        module = _module(trace, storage)
        totals[module] = totals.get(module, 0) + storage.bytes
    running = trace.operators[index].module
    totals[running] = totals.get(running, 0) + trace.levels[index] - sum(totals.values())
    largest_first = sorted(totals.items(), key=lambda item: -item[1])
    return {module: size for module, size in largest_first if size}


def _module(trace: StepTrace, storage: StorageRecord) -> str:
    if storage.category in _OWNED and storage.name:
        return storage.name.partition(" ")[0].rpartition(".")[0]  # a state is "layers.0.weight exp_avg"
    return "" if storage.operator is None else trace.operators[storage.operator].module
