"""How a training goes, on stderr: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from tightfit.planner.plans import Plan
from tightfit.planner.report.plan_tables import summary
from tightfit.planner.report.terminal import rendered
from tightfit.training.reporter import Start
from tightfit.training.result import StepMetrics, TrainResult
from tightfit.units import brief_bytes

# What the figures of memory are: of the process on a CPU, of the allocator on a card.
PEAK = "peak: the most memory that the tensors of a step take, which a budget limits"
LEGEND = {
    "cpu": f"{PEAK}; process: all memory of this process, Python and libraries included",
    "cuda": f"{PEAK}; allocated: what tensors take between two steps",
}
LINES = 15  # of a training whose output is no terminal, beside the first and the last
BESIDE = 21  # columns that step, bar and remaining time take at least


class Screen(Console):
    """A console that leaves it to us what becomes of a training whose output nobody reads any more."""

    def on_broken_pipe(self) -> None:
        raise


class ProgressReporter:
    """Shows loss, speed and memory while a training runs. A context manager: the bar is taken down at its end.

    Where the terminal was closed, or the pipe's reader has ended, the training goes on and nothing more is shown.
    `plan` and `result` are what it was told last, None before.
    """

    def __init__(self, console: Console | None = None):
        self._is_gone = False
        self.console = console or Screen(stderr=True, highlight=False, markup=False)
        self.plan: Plan | None = None
        self.result: TrainResult | None = None
        self._start: Start | None = None
        self._peak_bytes: int | None = None
        self._bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            refresh_per_second=2,
            disable=not self.console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._show(self._bar.stop)

    def on_note(self, line: str) -> None:
        self._show(lambda: self.console.print(line, soft_wrap=True))

    def on_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._show(lambda: self.console.print(rendered("", *summary(plan), "", width=self.console.width)))

    def on_start(self, start: Start) -> None:
        self._start = start
        self._bar.update(self._task, total=start.max_steps)
        self.on_note(LEGEND[start.device])
        self._show(self._bar.start)

    def on_peak(self, measured_peak_bytes: int) -> None:
        self._peak_bytes = measured_peak_bytes

    def on_step(self, metrics: StepMetrics) -> None:
        assert self._start is not None, "a training starts before its first step"
        peak, now = self.memory(metrics)
        shown = [f"loss {metrics.loss:.3f}", peak, f"{metrics.tokens_per_second:,.0f} tok/s", now]
        if metrics.reward is not None:
            shown[0] += f"  reward {metrics.reward:.3f}"
        if metrics.validation_loss is not None:
            shown[0] += f"  held out {metrics.validation_loss:.3f}"
        if not self._bar.disable:
            room = self.console.width - BESIDE
            while len("  ".join(shown)) > room and len(shown) > 1:
                shown.pop()  # the least telling figure stands last
            self._bar.update(self._task, completed=metrics.step, description="  ".join(shown))
        elif metrics.step in (1, self._start.max_steps) or metrics.step % max(1, self._start.max_steps // LINES) == 0:
            self.on_note("  ".join((f"step {metrics.step}/{self._start.max_steps}", *shown)))

    def on_end(self, result: TrainResult) -> None:
        self.result = result

    def _show(self, write: Callable[[], object]) -> None:
        if not self._is_gone:
            try:
                write()
            except OSError:
                self._is_gone = True

    def memory(self, metrics: StepMetrics) -> tuple[str, str]:
        """The peak of a step beside its budget, and what the whole process has now, which no budget limits."""
        assert self._start is not None, "a training starts before its first step"
        peak = self._start.predicted_peak_bytes if self._peak_bytes is None else self._peak_bytes
        budget = self._start.budget_bytes
        within = brief_bytes(peak) if budget is None else f"{brief_bytes(peak)} of {brief_bytes(budget)} budget"
        now = "process" if self._start.device == "cpu" else "allocated"
        return f"peak {within}", f"{now} {brief_bytes(metrics.memory_bytes)}"
