"""The host's memory while a training runs: what was predicted, what the process takes, and the user's limit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from tightfit.memory.counters import highest_rss, this_process
from tightfit.memory.process import give_back_at_once, process_bytes
from tightfit.training.config import Config
from tightfit.training.fitting import Fit
from tightfit.units import format_bytes, parse_bytes

PREPARATION = "preparation"  # data, tokenizer, plan, and weights on their way to a card


@dataclass
class HostWatch:
    """Mutable: the predicted peak by category, once the steps begin, and whether the budget was exceeded.

    With a budget, freed memory returns to the system from here on.
    """

    config: Config
    note: Callable[[str], None]
    by_category: Mapping[str, int] = field(default_factory=dict)
    is_over: bool = False

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and not give_back_at_once():
            self.note(
                "memory.host_budget: the C library of this system keeps freed memory, so the process may take more"
            )

    @property
    def budget_bytes(self) -> int | None:
        budget = self.config.memory.host_budget
        return None if budget is None else parse_bytes(budget)

    def begin(self, fitted: Fit, model: nn.Module) -> None:
        """The prediction for the steps, from what the process takes now. What has been until now is known."""
        process = process_bytes([*model.parameters(), *model.buffers()], tidied=self.budget_bytes is not None)
        steps = replace(fitted, host=replace(fitted.host, process=process, loaded=0))
        before = highest_rss()
        self.by_category = {PREPARATION: before} if before > steps.host_peak_bytes else steps.host_by_category
        self.look()

    def look(self) -> None:
        """Say it once if the process takes more than the budget."""
        budget = self.budget_bytes
        if budget is None or self.is_over:
            return
        resident = this_process().memory_info().rss
        self.is_over = resident > budget
        if self.is_over:
            self.note(
                f"memory.host_budget: the process takes {format_bytes(resident)} of the host's memory, more than "
                f"{format_bytes(budget)}; {format_bytes(sum(self.by_category.values()))} were predicted"
            )
