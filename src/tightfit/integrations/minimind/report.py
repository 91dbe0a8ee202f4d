"""Reports a MiniMind training under a plan, as text for a terminal."""

from tightfit.integrations.minimind.scripts import MiniMindRun
from tightfit.planner.levers import CompiledBlocks
from tightfit.planner.plans import Plan
from tightfit.planner.report.plan_tables import block_table, notes, worst_case
from tightfit.planner.report.terminal import WIDTH, rendered, table_of
from tightfit.training.monitoring.describe import source_in_words
from tightfit.training.monitoring.recorded import RecordedTraining
from tightfit.units import format_bytes, format_count, format_seconds

AS_PREDICTED = 0.001  # the accuracy of a predicted peak that docs/guarantees.md promises

RESIDENT = "resident memory"  # the source of a peak where no step was traced
# PyTorch allocates them in C++, and a recorder of operators sees them where backward writes into them.
BUCKETS = "DDP's buckets are in the predicted peaks, and in the measured one from backward's first write into them on."


def against_prediction(measured_bytes: int, predicted_bytes: int) -> str:
    """`as predicted`, or the difference from the prediction."""
    off = measured_bytes / predicted_bytes - 1
    if abs(off) <= AS_PREDICTED:
        return "as predicted"
    return f"{abs(off):.1%} {'more' if off > 0 else 'less'} than the {format_bytes(predicted_bytes)} predicted"


def measured(record: RecordedTraining, plan: Plan) -> str:
    """The measured peak beside the budget. Resident memory of a process is compared with nothing."""
    budget, peak = format_bytes(plan.budget_bytes), format_bytes(record.peak_bytes)
    if record.peak_source == RESIDENT:
        return f"Budget {budget}; planned peak {format_bytes(plan.peak_bytes)}; {peak} {source_in_words(record)}."
    return (
        f"Budget {budget}; measured peak {peak} ({record.peak_bytes / plan.plain_peak_bytes:.1%} of the plain one, "
        f"{against_prediction(record.peak_bytes, plan.peak_bytes)}): {source_in_words(record)}."
    )


def compiling(run: MiniMindRun) -> list[str]:
    """A line about how the script's `torch.compile` was handled."""
    if not run.compiles or run.plan is None:
        return []
    if run.plan.lever(CompiledBlocks) is not None:
        return ["The script compiles its model, and the plan has compiled its blocks instead."]
    why = dict.fromkeys(each.reason for each in run.plan.rejected if CompiledBlocks.title in each.levers)
    reasons = "; ".join(why) or "none would be faster within the budget"
    return [f"The script compiles its model. Within the plan it runs as eager code: {reasons}."]


def describe_run(run: MiniMindRun, width: int = WIDTH) -> str:
    """The plain, the planned and the measured peak, and the choices of the blocks."""
    record, plan = run.record, run.plan
    if plan is None:
        return "tightfit: the script ended before it trained, so nothing was planned."
    recomputing = sum(choice.action != "keep" for choice in plan.choices)
    ranks = "" if plan.world_size == 1 else f"{plan.world_size} ranks in DDP, this is rank 0; "
    micro = f" of {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    table = table_of("a step" + micro, "plain", "planned", "measured")
    peaks = (plan.plain_peak_bytes, plan.peak_bytes, *([] if record.peak_source == RESIDENT else [record.peak_bytes]))
    table.add_row("peak", *map(format_bytes, peaks), *([""] * (3 - len(peaks))))
    seconds = (plan.plain.step_seconds, plan.step_seconds, record.step_seconds)
    table.add_row("time", *("" if s is None else format_seconds(s) for s in seconds))
    return rendered(
        f"{record.model}, {format_count(record.parameters)} parameters, {record.optimizer}, {record.device}; "
        f"{ranks}{record.steps} steps, {recomputing} of {len(plan.choices)} blocks recompute.",
        *compiling(run),
        measured(record, plan),
        *([] if plan.world_size == 1 else [BUCKETS]),
        *worst_case(plan.peak_bytes, plan.worst_peak_bytes),
        "",
        table,
        *(["", block_table(plan.choices)] if recomputing else []),
        *notes(plan.assumptions),
        width=width,
    )
