"""`with tightfit.monitor(model, optimizer) as watch:` around any training loop."""

import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from tightfit.errors import InputError
from tightfit.memory.counters import allocator_state
from tightfit.memory.failure import parse_out_of_memory
from tightfit.memory.pool import named_pools
from tightfit.planner.step_figures import step_figures
from tightfit.planner.wrapped import refuse_sharded
from tightfit.runtime.internals import compiled_code_off, is_innermost
from tightfit.runtime.module_paths import unwrapped
from tightfit.runtime.nested import tensors_in
from tightfit.runtime.outside import outside
from tightfit.tracing.record import Category, Phase, StepTrace
from tightfit.training.monitoring.real_run import RealRun, WatchedModules, bytes_by_module
from tightfit.training.monitoring.record import Record
from tightfit.training.monitoring.recorded import RecordedFailure, Sample
from tightfit.training.monitoring.sampler import Sampler
from tightfit.training.monitoring.stage import Stage
from tightfit.training.monitoring.where import PlaceInStep, place_of_error

RECENT_STEPS = 101  # the time of a step is the median over the latest ones
TRACED_STEP = 2  # in the first step the optimizer makes its states only at the end


def monitor(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, traced_step: int | None = TRACED_STEP
) -> "Monitor":
    """Monitor the memory of a training loop.

    The monitor records steps up to `traced_step` operator by operator. These steps are slower, and otherwise unchanged.
    Afterwards it reads the counters of the system and of CUDA's allocator when phases change. Nothing remains on the
    model afterwards. Exceptions pass through, and the record is kept.

    Args:
        model: The module that is trained.
        optimizer: Its `step` ends a step. None: each backward does.
        traced_step: The last step that is recorded operator by operator. None: no step is.

    Returns:
        A context manager that holds the figures.

    Raises:
        InputError: An argument is wrong.
        ModelError: The model is sharded.

    Example:
        >>> import tightfit, torch
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tightfit.monitor(model, optimizer) as watch:
        ...     for _ in range(3):
        ...         model(torch.randn(16, 64)).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> watch.steps, watch.record().peak_bytes > 0
        (3, True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    refuse_sharded(model, "the monitor")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer or None")
    if traced_step is not None and traced_step < 1:
        raise InputError(f"traced_step {traced_step} is not a step: count from 1, or give None")
    watch = Monitor(traced_step=traced_step, has_optimizer=optimizer is not None)
    watch.add_model(model)
    if optimizer is not None:
        watch.add_optimizer(optimizer)
    return watch


class Monitor:
    """The monitor of a training. Mutable while the training runs.

    `record()` returns its figures as a `Record`. `trace` is the traced step as a `StepTrace`.
    """

    def __init__(self, *, traced_step: int | None = TRACED_STEP, has_optimizer: bool = True):
        self.traced_step = traced_step or 0
        self.trace: StepTrace | None = None
        self.steps = 0
        self.failure: RecordedFailure | None = None
        self.stage = Stage(
            self._phase_changes, self._inputs, self.add_optimizer_state, self._step_ends, has_optimizer=has_optimizer
        )
        self._models: dict[str, nn.Module] = {}  # by the prefix of their paths
        self._optimizers: list[torch.optim.Optimizer] = []
        self._resident: list[weakref.ref[torch.Tensor]] = []
        self._device = torch.device("cpu")
        self._traced = 0  # the number of the step in `trace`
        self._complete = False
        self._run: RealRun | None = None
        self._modules: WatchedModules | None = None
        self._stance: Callable[[], None] = lambda: None  # enables compiled code again
        self._record: Record | None = None
        self._sampler = Sampler()
        self._step_began = self._outside_began = time.perf_counter()
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    # Models and optimizers

    def add_model(self, model: nn.Module) -> None:
        """Add a model. The paths of a second model begin with the name of its class."""
        prefix = f"{type(model).__name__}." if self._models else ""
        while prefix in self._models:
            prefix = f"{prefix[:-1]}'."
        self._models[prefix] = model

    def add_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors as long as they exist, even if no step reads them."""
        self._resident += [weakref.ref(tensor) for tensor in tensors]

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)

    def add_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer that is about to step, if it is new."""
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)

    # Beginning and end

    def __enter__(self) -> Self:
        for optimizer in self._optimizers:
            self.stage.follow_optimizer(optimizer)
        self.start()
        return self

    def enter_call(self, model: nn.Module, args: tuple) -> None:
        """Enter a model's call that began before the monitoring did."""
        if self._modules is not None:
            self._modules.stack.append(self._modules.paths[id(model)])
        self.stage.forward_begins(model, args, {})

    def start(self) -> None:
        """Begin to follow the models and to sample, and to trace unless `traced_step` is None."""
        for model in self._models.values():
            self.stage.follow_model(model)
        models = list(self._models.values())
        self._device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
        self._sampler.start(self._device)
        self._step_began = time.perf_counter()
        outside.callbacks = (*outside.callbacks, self._on_outside)
        if self.traced_step:
            self._start_tracing()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(error)

    def stop(self, error: BaseException | None = None) -> None:
        """End the monitoring. An `Exception` is kept as the failure that ended the training."""
        self._sampler.sample(self.steps + 1, self.stage.phase, always=True)
        self.stage.ends()
        try:
            self._keep_partial_trace()
            if isinstance(error, Exception):
                self.failure = self._failure(error)
        finally:  # remove all hooks, even if the record cannot be made
            self.stage.remove()
            self._stop_tracing()
            outside.callbacks = tuple(callback for callback in outside.callbacks if callback != self._on_outside)
        self._record = self._make_record()
        self._models, self._optimizers = {}, []

    # Tracing

    def _start_tracing(self) -> None:
        self._modules = WatchedModules(self._models, self.stage.outside)
        self._modules.__enter__()
        # No operator of compiled code passes the dispatcher, so the traced steps run eagerly.
        self._stance = compiled_code_off()
        self._run = RealRun(self._device, self._modules, self.stage.backward_begins, self.stage.outside)
        self._run.phase = self.stage.phase
        self._label()
        self._run.__enter__()

    def _stop_tracing(self) -> None:
        """Remove the dispatch mode."""
        if self._run is None:
            return
        # Modes form a stack. If another one was entered after ours, ours cannot be removed now and remains passive.
        self._run.passive = True
        self._run.ledger.close()
        if self._modules is not None:
            self._modules.__exit__()
            self._modules = None
        self._stance()
        if is_innermost(self._run):
            self._run.__exit__(None, None, None)
            self._run = None

    def _label(self) -> None:
        """Set the categories of the models' and the optimizers' storages."""
        if self._run is None or self._run.ledger.closed:
            return
        for reference in self._resident:
            tensor = reference()
            if tensor is not None and tensor.device == self._run.device:
                self._run.ledger.enter(tensor, Category.INPUT)
        names: dict[torch.Tensor, str] = {}
        for prefix, model in self._models.items():
            self._run.enter_model(model, prefix)
            names |= {parameter: f"{prefix}{name}" for name, parameter in model.named_parameters()}
        for optimizer in self._optimizers:
            self._run.enter_states(optimizer, names)

    def _keep_trace(self, *, complete: bool) -> None:
        assert self._run is not None, "a step is being traced"
        self._label()
        self.trace = self._run.step_trace()
        self._traced, self._complete = self.steps + 1, complete

    def _keep_partial_trace(self) -> None:
        """Keep the trace of the running step if it failed, or if no other step was traced."""
        run = self._run
        if run is None or run.ledger.closed or not run.operators:
            return
        if run.failed_at is not None or self.trace is None:
            self._keep_trace(complete=False)

    # Callbacks of the stage

    def _phase_changes(self, old: Phase, new: Phase) -> None:
        self._sampler.sample(self.steps + 1, old)
        if self._run is not None and not self._run.passive:
            self._run.phase = new
            if old is Phase.BACKWARD:
                self._label()  # gradients, before the loop sets them to None

    def _on_outside(self, begins: bool) -> None:
        """Code outside of the training begins or has ended. Its time and memory do not count."""
        self.stage.outside.begun = begins
        if begins:
            self._sampler.sample(self.steps + 1, self.stage.phase)
            self._outside_began = time.perf_counter()
        else:
            self._sampler.skip()
            self._step_began += time.perf_counter() - self._outside_began

    def _inputs(self, args: tuple, kwargs: dict) -> None:
        if self._run is not None and not self._run.passive:
            for tensor in tensors_in((args, kwargs)):
                self._run.ledger.enter(tensor, Category.INPUT)

    def _step_ends(self) -> None:
        ended = time.perf_counter()
        if self._run is not None:
            self._traced_step_ends(self._run)
        else:
            self._step_seconds.append(ended - self._step_began)
        self.steps += 1
        self._step_began = time.perf_counter()

    def _traced_step_ends(self, run: RealRun) -> None:
        if run.ledger.closed:  # another mode was active when tracing stopped: try again to remove ours
            self._stop_tracing()
        elif run.failed_at is not None:
            self._keep_trace(complete=False)
            self._stop_tracing()
        else:
            self._keep_trace(complete=True)
            if self.steps + 1 >= self.traced_step:
                self._stop_tracing()
            else:
                run.begin_again()

    # Results

    def record(self) -> Record:
        """All figures as plain data. Within the loop: the figures so far."""
        return self._record or self._make_record()

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The counters at changes of phase."""
        return tuple(self._sampler.samples)

    @property
    def peak_bytes(self) -> int:
        """The highest memory in use. `Record.peak_source` names its source."""
        return self.record().peak_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak of the traced step: parameters, gradients, optimizer states, activations, inputs,
        workspace.
        """
        return dict(self.record().by_category)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak of the traced step, by module path, the largest first."""
        return dict(self.record().by_module)

    @property
    def phase_peaks(self) -> dict[str, int]:
        """The highest memory in use in forward, recompute, backward and optimizer."""
        return dict(self.record().phase_peaks)

    @property
    def rss_bytes(self) -> int:
        """The highest resident memory of this process."""
        return self.record().rss_bytes

    def live(self) -> dict[str, int]:
        """Bytes in use now, by category. Outside of a traced step, only those of models and optimizers."""
        run = self._run
        if run is not None and not run.ledger.closed and run.operators:
            self._label()
            trace = run.step_trace()
            found = trace.by_category(len(trace.levels) - 1)
        else:
            found = self._held()
        return {str(category): size for category, size in found.items()}

    def to_json(self, path: str | Path) -> None:
        """Write the record to a file."""
        self.record().to_json(path)

    def to_png(self, path: str | Path) -> None:
        """Draw the traced step and the samples. Raises `InputError` if matplotlib is not installed."""
        from tightfit.training.monitoring.picture import record_picture

        Path(path).write_bytes(record_picture(self.record()))

    def __str__(self) -> str:
        return str(self.record())

    def _held(self) -> dict[Category, int]:
        """Bytes of parameters, gradients and states. Each storage counts once."""
        from tightfit.memory.allocator import storage_bytes
        from tightfit.optim.by_name import state_tensors
        from tightfit.optim.in_backward import gradient_memory

        parameters = [p for model in self._models.values() for p in model.parameters()]
        buffers = [b for model in self._models.values() for b in model.buffers()]
        gradients = [gradient for p in parameters if (gradient := gradient_memory(p)) is not None]
        return {
            Category.PARAMETER: storage_bytes([*parameters, *buffers]),
            Category.GRADIENT: storage_bytes(gradients),
            Category.OPTIMIZER_STATE: storage_bytes(t for o in self._optimizers for t in state_tensors(o)),
        }

    def _failure(self, error: Exception) -> RecordedFailure:
        out_of_memory = parse_out_of_memory(str(error))
        paths = {
            id(module): f"{prefix}{path}".rstrip(".")
            for prefix, model in self._models.items()
            for path, module in model.named_modules()
        }
        found = place_of_error(error, paths)
        place = PlaceInStep(found.phase or str(self.stage.phase), found.module)
        if self._run is not None and self._run.failed_at is not None:
            operator = self._run.operators[self._run.failed_at]
            place = PlaceInStep(str(operator.phase), operator.module or found.module, operator.name)
        message = out_of_memory.message if out_of_memory else str(error)
        return RecordedFailure(type(error).__name__, message, *place, out_of_memory)

    def _make_record(self) -> Record:
        traced = None if self.trace is None else step_figures(self.trace)
        if self.trace is not None and traced is not None:
            by_category, by_module = dict(traced.by_category), bytes_by_module(self.trace)
        else:
            by_category, by_module = {str(c): size for c, size in self._held().items()}, {}
        sampler = self._sampler
        # The most direct measurement wins: CUDA's counter, then the traced step, then resident memory, which includes
        # Python and libraries.
        if sampler.allocated_peaks:
            peak, source, phases = sampler.allocated_peak, "CUDA allocator", sampler.allocated_peaks
        elif traced is not None:
            peak, source, phases = traced.peak_bytes, "traced step", traced.phase_peaks
        else:
            peak, source, phases = sampler.rss_peak, "resident memory", sampler.rss_peaks
        return Record(
            peak_bytes=peak,
            peak_source=source,
            by_category=by_category,
            by_module=by_module,
            phase_peaks={str(phase): size for phase, size in phases.items() if size},
            rss_bytes=sampler.rss_peak,
            rss_by_phase={str(phase): size for phase, size in sampler.rss_peaks.items()},
            steps=self.steps,
            step_seconds=statistics.median(self._step_seconds) if self._step_seconds else None,
            traced_step=self._traced,
            complete=self._complete,
            traced=traced,
            model=" and ".join(type(unwrapped(model)).__name__ for model in self._models.values()),
            parameters=sum(p.numel() for model in self._models.values() for p in model.parameters()),
            optimizer=" and ".join(type(optimizer).__name__ for optimizer in self._optimizers) or None,
            device=str(self._device),
            allocator=allocator_state(self._device),
            samples=self.samples,
            failure=self.failure,
            pools=named_pools(),
        )
