"""Reports a MiniMind training under a plan, as text for a terminal."""

from tightfit.integrations.minimind import MiniMindRun
from tightfit.monitoring.describe import source_in_words
from tightfit.report.plan_tables import block_table, notes, worst_case
from tightfit.report.terminal import WIDTH, rendered, table_of
from tightfit.units import format_bytes, format_count, format_seconds

AS_PREDICTED = 0.001  # the accuracy of a predicted peak that docs/guarantees.md promises

# PyTorch allocates them in C++, and a recorder of operators sees them where backward writes into them.
BUCKETS = "DDP's buckets are in the predicted peaks, and in the measured one from backward's first write into them on."


def against_prediction(measured_bytes: int, predicted_bytes: int) -> str:
    """`as predicted`, or the difference from the prediction."""
    off = measured_bytes / predicted_bytes - 1
    if abs(off) <= AS_PREDICTED:
        return "as predicted"
    return f"{abs(off):.1%} {'more' if off > 0 else 'less'} than the {format_bytes(predicted_bytes)} predicted"


def describe_run(run: MiniMindRun, width: int = WIDTH) -> str:
    """The plain, the planned and the measured peak, and the choices of the blocks."""
    record, plan = run.record, run.plan
    if plan is None:
        return "tightfit: the script ended before it trained, so nothing was planned."
    recomputing = sum(choice.action != "keep" for choice in plan.choices)
    ranks = "" if plan.world_size is None else f"{plan.world_size} ranks in DDP, this is rank 0; "
    micro = f" of {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    table = table_of("a step" + micro, "plain", "planned", "measured")
    table.add_row("peak", *map(format_bytes, (plan.plain_peak_bytes, plan.peak_bytes, record.peak_bytes)))
    seconds = (plan.plain.step_seconds, plan.step_seconds, record.step_seconds)
    table.add_row("time", *("" if s is None else format_seconds(s) for s in seconds))
    return rendered(
        f"{record.model}, {format_count(record.parameters)} parameters, {record.optimizer}, {record.device}; "
        f"{ranks}{record.steps} steps, {recomputing} of {len(plan.choices)} blocks recompute.",
        f"Budget {format_bytes(plan.budget_bytes)}; measured peak {format_bytes(record.peak_bytes)} "
        f"({record.peak_bytes / plan.plain_peak_bytes:.1%} of the plain one, "
        f"{against_prediction(record.peak_bytes, plan.peak_bytes)}): {source_in_words(record)}.",
        *([] if plan.world_size is None else [BUCKETS]),
        *worst_case(plan.peak_bytes, plan.worst_peak_bytes),
        "",
        table,
        *(["", block_table(plan.choices)] if recomputing else []),
        *notes(plan.assumptions),
        width=width,
    )
