"""The pictures of a run's step: memory.png and report.html, each if the package that draws it is installed."""

from collections.abc import Callable

from tightfit.errors import InputError
from tightfit.planner.report.picture import DOTS, HEIGHT, WIDTH, memory_picture
from tightfit.planner.report.plan_page import plan_page, run_page
from tightfit.training.fitting import Fit
from tightfit.training.reporter import Reporter
from tightfit.training.result import TrainResult
from tightfit.training.storage import PAGE, PICTURE, RunFolder
from tightfit.units import format_count


def write_pictures(result: TrainResult, fitted: Fit, folder: RunFolder, reporter: Reporter) -> None:
    """Draw what can be drawn; a training does not fail for lack of a picture, but says so."""
    setting = f"{format_count(result.parameters)} parameters, {result.precision}, {result.device}"
    drawings: dict[str, Callable[[], str | bytes]] = {
        PICTURE: lambda: _picture(result, fitted),
        PAGE: lambda: _page(result.measured_peak_bytes, setting, fitted),
    }
    for name, draw in drawings.items():
        try:
            folder.write(name, draw())
        except InputError as error:
            reporter.on_note(str(error))


def most_bytes(fitted: Fit) -> int:
    """The bytes of picture and page: the one's pixels as they are, which is more, and the other as it is predicted."""
    pixels = round(WIDTH * DOTS) * round(HEIGHT * DOTS) * len("RGBA")
    try:
        return pixels + len(_page(fitted.planned.peak_bytes, "", fitted).encode())
    except InputError:
        return pixels


def _picture(result: TrainResult, fitted: Fit) -> bytes:
    return memory_picture(
        fitted.plain,
        fitted.planned if fitted.has_levers else None,
        budget_bytes=fitted.whole_budget_bytes,
        measured_peak_bytes=result.measured_peak_bytes,
        plain_micro_batches=fitted.plain_micro_batches,
        micro_batches=fitted.micro_batches,
    )


def _page(measured: int, setting: str, fitted: Fit) -> str:
    before = fitted.plain_micro_batches
    if fitted.plan is not None:
        return plan_page(fitted.plan, measured_peak_bytes=measured, plain_micro_batches=before)
    return run_page(
        fitted.plain,
        fitted.planned if fitted.has_levers else None,
        measured_peak_bytes=measured,
        plain_micro_batches=before,
        micro_batches=fitted.micro_batches,
        setting=setting,
    )
