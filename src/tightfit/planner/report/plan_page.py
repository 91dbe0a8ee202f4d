"""Writes plans and estimates as HTML pages."""

from tightfit.planner.outcome import EstimateRecord, PlanRecord
from tightfit.planner.records import StepFigures
from tightfit.planner.report.page import Page, render
from tightfit.planner.report.plan_tables import device_footprint, summary
from tightfit.planner.report.words import arithmetic, where, without_folders
from tightfit.units import format_bytes, format_count, format_seconds
from tightfit.version import package_version


def estimate_page(estimate: EstimateRecord) -> str:
    """The page of an estimate. Raises `InputError` if plotly is not installed."""
    step_figures = estimate.step_figures
    computed = arithmetic(estimate.weights, estimate.precision)
    share = f"{step_figures.peak_bytes / estimate.device_bytes:.1%} of {estimate.device}"
    return render(
        Page(
            title=f"One training step takes {format_bytes(step_figures.peak_bytes)}",
            lead=[*device_footprint(estimate), f"The peak is in {where(step_figures)}."],
            facts=[
                ("peak", format_bytes(step_figures.peak_bytes), share),
                ("step", format_seconds(step_figures.step_seconds), "predicted"),
                ("parameters", format_count(estimate.parameters), computed),
            ],
            plain=step_figures,
            plain_name=f"Plain: no lever, {estimate.optimizer}",
            notes=without_folders(estimate.assumptions),
            setting=f"{computed}, {estimate.optimizer}, {estimate.device}; {_version()}",
        )
    )


def plan_page(plan: PlanRecord, *, measured_peak_bytes: int | None = None, plain_micro_batches: int = 1) -> str:
    """The page of a plan: the plain and the planned step, the curve if there is one, and rejected levers.

    `measured_peak_bytes` is the allocator's record of the planned step, if it ran. Raises `InputError` if plotly is not
    installed.
    """
    setting, fits, *levers = summary(plan)
    curve = plan.curve
    ratio = plan.step_seconds / plan.plain.step_seconds if plan.plain.step_seconds else 1.0
    share = plan.peak_bytes / plan.plain_peak_bytes
    facts = [
        ("planned peak", format_bytes(plan.peak_bytes), f"{share:.0%} of plain"),
        ("plain peak", format_bytes(plan.plain_peak_bytes), f"in {plan.plain.peak_phase}"),
        ("budget", format_bytes(plan.budget_bytes), f"{plan.budget_bytes / plan.plain_peak_bytes:.0%} of plain"),
        ("step", format_seconds(plan.step_seconds), f"{ratio:.2f}x of plain, predicted"),
    ]
    if measured_peak_bytes is not None:
        facts.insert(1, _measured(measured_peak_bytes, plan.peak_bytes))
    return render(
        Page(
            title=fits,
            lead=levers,
            facts=facts,
            plain=plan.plain,
            plain_name=f"Plain: no lever{_micro_batches(plain_micro_batches)}",
            planned=None if plan.planned == plan.plain else plan.planned,
            planned_name=f"Planned{_micro_batches(plan.micro_batches)}",
            budget_bytes=plan.budget_bytes,
            measured_peak_bytes=measured_peak_bytes,
            points=() if curve is None else curve.points,
            recipes=() if curve is None else curve.recipes,
            choices=plan.choices,
            rejected=plan.rejected,
            notes=without_folders(plan.assumptions),
            setting=f"{setting}; {_version()}",
        )
    )


def run_page(
    plain: StepFigures,
    planned: StepFigures | None,
    *,
    measured_peak_bytes: int,
    plain_micro_batches: int,
    micro_batches: int,
    setting: str,
) -> str:
    """The page of a training without a plan: the plain step, the step that ran with levers set by hand (None if it is
    the same), and the measured peak. Raises `InputError` if plotly is not installed.
    """
    ran = plain if planned is None else planned
    return render(
        Page(
            title=f"One training step took {format_bytes(measured_peak_bytes)}",
            lead=[f"The peak is in {where(ran)}."],
            facts=[
                _measured(measured_peak_bytes, ran.peak_bytes),
                ("predicted peak", format_bytes(ran.peak_bytes), f"{ran.peak_bytes / plain.peak_bytes:.0%} of plain"),
                ("step", format_seconds(ran.step_seconds), "predicted"),
            ],
            plain=plain,
            plain_name=f"Plain: no lever{_micro_batches(plain_micro_batches)}",
            planned=planned,
            planned_name=f"As it ran{_micro_batches(micro_batches)}",
            measured_peak_bytes=measured_peak_bytes,
            setting=f"{setting}; {_version()}",
        )
    )


def _measured(measured_bytes: int, predicted_bytes: int) -> tuple[str, str, str]:
    error = predicted_bytes - measured_bytes
    return "measured peak", format_bytes(measured_bytes), f"predicted {error:+,} bytes" if error else "as predicted"


def _micro_batches(count: int) -> str:
    """The micro-batches in a timeline, in words. It shows two: all after the first are like the second."""
    if count == 1:
        return ""
    return ", 2 micro-batches" if count == 2 else f", the last 2 of {count} micro-batches"


def _version() -> str:
    return f"tightfit {package_version()}"
