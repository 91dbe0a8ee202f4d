"""`tightfit.trace`: the peak, the timeline and the seconds of any code, run dry."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, overload

from tightfit.devices.cost import CostModel
from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import InputError
from tightfit.ops.weights.low_bit import weights_in
from tightfit.planner.any_code.describe import describe_code
from tightfit.planner.any_code.records import CodeRecord
from tightfit.planner.arguments import refuse_compiled
from tightfit.planner.estimates import answers_refused, assumption_sentences, of_seconds, worst_outcome
from tightfit.planner.request import role_of
from tightfit.planner.step_figures import step_figures
from tightfit.planner.wrapped import refuse_distributed
from tightfit.tracing.code_run import CodeRun, code_run_dry
from tightfit.tracing.cuda.replay import fits_device
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.questions import Answers, run_again
from tightfit.tracing.reached import Reached
from tightfit.tracing.record import StepTrace
from tightfit.tracing.twin import forget_numbers, real_tensors
from tightfit.units import format_bytes

BLOCK = "with tightfit.trace()"


@overload
def trace(function: Callable[..., Any], *inputs: Any, device: Any = None, **keywords: Any) -> "Traced": ...
@overload
def trace(*, device: Any = None) -> "Traced": ...
def trace(function: Callable[..., Any] | None = None, *inputs: Any, device: Any = None, **keywords: Any) -> "Traced":
    """Predict the peak memory, its timeline and the time of any code, without computing it.

    `trace(function, *inputs)` runs `function(*inputs, **keywords)` dry, once: a forward, an evaluation, a generation, a
    loop with an optimizer, a single operator. Without a function, `with trace(device=...) as found:` runs the
    statements of the block dry, and `found` has the figures after the block.

    The modules, optimizers and tensors that the code refers to by name are its resident memory: the inputs, `self` of a
    method, variables of the function, of the functions around it and of its module. Modules' parameters and buffers
    count as parameters. What the code itself allocates is forward, backward or optimizer, as it runs.

    Large results have shapes and no numbers, and those of a block are on the meta device after it. A number that is
    read from one (`.item()`, `if tensor.any()`) gets the answer of a dry run, and `found.assumptions` names it.
    A function that reads one runs with the other answers too, and the figures are those of the higher peak.
    Afterwards weights, buffers, gradients, optimizers' states, random states, and the containers and attributes that
    the code can reach are as before. Variables that a block assigns keep what it assigned, and iterators that it has
    advanced stay there. An exception of the code comes through.

    Args:
        function: The code. None: the statements of a `with` block.
        *inputs: The function's positional arguments.
        device: As for `tightfit.estimate`; for a card, CPU tensors stand for the card's.
        **keywords: The function's keyword arguments.

    Returns:
        The figures: bytes as integers, seconds as floats.

    Raises:
        InputError: The code runs no operator.
        TraceError: An operator cannot run dry.

    Example:
        >>> import tightfit, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
        >>> x = torch.randn(4096, 512)
        >>> forward = tightfit.trace(model, x, device="rtx4090")
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tightfit.trace(device="rtx4090") as loop:
        ...     for _ in range(2):
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> forward.peak_bytes < loop.peak_bytes
        True
        >>> len(optimizer.state)  # nothing of it was computed
        0
    """
    found = Traced(device)
    if function is None:
        if inputs or keywords:
            raise InputError("trace got inputs and no function: give a callable first, or only device= for a block")
        return found
    if not callable(function):
        raise InputError(f"function is a {type(function).__name__}, wanted a callable; for a block: {BLOCK} as found")
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise InputError(
            "function is compiled by torch.compile, and tightfit does not predict the memory of such code: pass the "
            "uncompiled function"
        )
    reached = Reached.of_call(function, (inputs, keywords))

    def run(outcome: Traced) -> Traced:
        with outcome.running(reached, _name_of(function)):
            function(*inputs, **keywords)
        return outcome

    run_again(found.answers, lambda: run(found))
    if found.has_answers:
        others = found.answers.others
        try:
            found.take_worse(run_again(others, lambda: run(Traced(device, others))))
        except Exception as error:  # other answers may be none: code may divide by them, or raise whatever it likes
            found.note(answers_refused(type(error).__name__))
    return found


class Traced:
    """The figures of code that was run dry. `with trace(...) as found` fills it at the end of the block."""

    def __init__(self, device: Any = None, answers: Answers | None = None):
        self._device = device
        self.answers = answers or Answers()
        self.has_answers = False  # whether the code read numbers that a dry run does not have
        self._record: CodeRecord | None = None
        self._stack: ExitStack | None = None
        self._frame: FrameType | None = None
        self._before: Reached | None = None

    def __enter__(self) -> Self:
        if self._record is not None or self._stack is not None:
            raise InputError(
                "this trace has run already: a block needs one of its own, `with tightfit.trace() as found`"
            )
        frame = sys._getframe(1)
        self._before, stack = Reached.of_frame(frame), ExitStack()
        stack.enter_context(self.running(self._before, "the block"))
        self._stack, self._frame = stack, frame
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack, frame, before = self._stack, self._frame, self._before
        assert stack, "the block was entered"
        assert frame, "the block was entered"
        assert before, "the block was entered"
        self._stack = self._frame = self._before = None
        try:
            stack.__exit__(kind, error, traceback)
        finally:
            # A read of memory that is not there would end the process; one of a tensor on meta raises an exception.
            forget_numbers(Reached.of_frame(frame).all_tensors(), before.all_tensors())

    def running(self, reached: Reached, name: str) -> "_Running":
        """A context whose code is run dry and recorded here."""
        return _Running(self, reached, name)

    def take_worse(self, other: "Traced") -> None:
        """Take the figures of the same code with other answers, if these are higher."""
        if other.peak_bytes > self.peak_bytes:
            self._record = other.record
            self.note(worst_outcome("numbers", 2))

    def note(self, assumption: str) -> None:
        """Add an assumption to the record."""
        self._record = replace(self.record, assumptions=(*self.record.assumptions, assumption))

    @property
    def record(self) -> CodeRecord:
        """All figures as plain data."""
        if self._record is None:
            raise InputError(f"the figures of `{BLOCK}` are there after its block: read them behind it")
        return self._record

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak; on CUDA, `torch.cuda.max_memory_allocated`."""
        return self.record.figures.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """On CUDA, `torch.cuda.max_memory_reserved`; None on a CPU."""
        return self.record.figures.reserved_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the code, once."""
        return self.record.figures.step_seconds

    @property
    def timeline(self) -> Mapping[str, tuple[int, ...]]:
        """Bytes by category at up to 600 of the operators, in their order; one of them is the peak."""
        return self.record.figures.timeline

    @property
    def by_category(self) -> Mapping[str, int]:
        """Bytes at the peak: parameters, gradients, optimizer states, activations, inputs, workspace."""
        return self.record.figures.by_category

    @property
    def phase_peaks(self) -> Mapping[str, int]:
        """The highest memory in use in forward, recompute, backward and optimizer."""
        return self.record.figures.phase_peaks

    @property
    def peak_phase(self) -> str:
        """Forward, recompute, backward or optimizer."""
        return self.record.figures.peak_phase

    @property
    def peak_module(self) -> str:
        """Path of the module that is running at the peak; empty outside of modules."""
        return self.record.figures.peak_module

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The numbers that the code read and the dry run assumed, with their lines."""
        return self.record.assumptions

    @property
    def fits(self) -> bool:
        """True if the code fits the device."""
        return self.record.fits

    def to_dict(self) -> dict[str, Any]:
        return dict(self.record.to_dict())

    def to_json(self, path: str | Path) -> None:
        """Write the figures to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def to_png(self, path: str | Path) -> None:
        """Draw the memory over time. Raises `InputError` if matplotlib is not installed."""
        from tightfit.planner.report.picture import memory_picture

        Path(path).write_bytes(memory_picture(self.record.figures, None))

    def __str__(self) -> str:
        return describe_code(self.record)

    def __repr__(self) -> str:
        if self._record is None:
            return "<tightfit.trace, not run yet>"
        return f"<tightfit.trace of {self._record.name}: peak {self._record.figures.peak_bytes:,} bytes>"


class _Running:
    """The context in which code runs dry; at its end it writes the record, unless the code raised."""

    # A class and no generator: the block's own exceptions come through with the user's frames only.

    def __init__(self, found: Traced, reached: Reached, name: str):
        self.found, self.reached, self.name = found, reached, name

    def __enter__(self) -> None:
        for path, module in self.reached.modules.items():
            refuse_compiled(module)
            refuse_distributed(module, f"trace{f' ({path})' if path else ''}")
        self.device = lookup(self.found._device)
        self.role = role_of(self.device)
        self.stack = ExitStack()
        with ExitStack() as stack:
            stack.enter_context(real_tensors())
            price = CostModel(self.device).operator_seconds
            self.dry: CodeRun = stack.enter_context(code_run_dry(self.reached, price, self.role, self.found.answers))
            self.stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trace: StepTrace | None = None
        made = 0
        with self.stack:  # restored whatever happens
            if error is None:
                trace, made = self.dry.trace(), self.dry.states_made()
        if trace is not None:
            self.found.has_answers = trace.has_answers
            modules = self.reached.modules.values()
            self.found._record = CodeRecord(
                name=self.name,
                figures=step_figures(trace),
                modules=tuple(dict.fromkeys(type(module).__name__ for module in modules)),
                parameters=sum({p: weights_in(p) for module in modules for p in module.parameters()}.values()),
                device=self.device.name,
                device_bytes=self.device.memory_bytes,
                context_bytes=0 if self.role is None else CONTEXT_BYTES,
                fits=fits_once(trace, self.device),
                assumptions=(
                    *assumption_sentences(trace.assumptions),
                    *_of_first_steps(made),
                    *of_seconds(self.device),
                ),
            )


def _of_first_steps(made: int) -> tuple[str, ...]:
    """The sentence for code that steps an optimizer once, which makes states of so many bytes."""
    held = f"the optimizer's first step made {format_bytes(made)} of states, with which a later step begins: "
    return (held + "for the peak of a training, trace two steps",) if made else ()


def fits_once(trace: StepTrace, device: DeviceSpec) -> bool:
    """True if code that runs once fits a device; on CUDA with the allocator's segments and the context."""
    if trace.reserved_bytes is None:
        return trace.peak_bytes <= device.memory_bytes
    room = device.memory_bytes - CONTEXT_BYTES
    return trace.reserved_bytes <= room or fits_device(trace, room, once=True)


def _name_of(function: Any) -> str:
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    return name.rpartition("<locals>.")[2]
