"""The error of a search in which nothing fits: the least, what holds it up, and what bounds it."""

from tightfit.errors import CannotFit
from tightfit.planner.levers import MicroBatches, Offload
from tightfit.planner.search.search import Search
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.units import format_bytes


def cannot_fit(search: Search) -> CannotFit:
    assert search.least is not None, "the plain step was traced"
    least, trace = search.least, search.least.trace
    holds = max(trace.by_category().items(), key=lambda item: item[1])
    device = search.request.device
    limit, taken = f"{format_bytes(search.budget_bytes)} cannot fit", None
    if least.needed_bytes <= search.budget_bytes:  # tensors fit the budget, so the device's memory is the limit
        taken = (trace.reserved_bytes or 0) + CONTEXT_BYTES
        limit = (
            f"the step cannot fit {device.name}: with what the allocator reserves and the context it takes "
            f"{format_bytes(taken)} of {format_bytes(search.device_bytes)}"
        )
    return CannotFit(
        f"{limit}: the least is {format_bytes(least.needed_bytes)} "
        f"({least.needed_bytes} bytes), reached by {search.in_words(least)}; it is held up in "
        f"{trace.peak_operator.phase} at {trace.peak_operator.module or 'the top level'} "
        f"by {format_bytes(holds[1])} of {holds[0]}{offload_bound(search)}{no_micro_batches(search)}",
        least.needed_bytes,
        taken,
    )


def no_micro_batches(search: Search) -> str:
    """Why the batch may not be split, for the message; empty if it may, or if nobody allowed it."""
    refusal = search.request.separation.refusal if search.request.may(MicroBatches) else None
    return "" if refusal is None else f"; {MicroBatches.title} is left out: {refusal}"


def offload_bound(search: Search) -> str:
    """The user's own limit for offload, for the message; empty if there is none."""
    allowed = search.request.offload.budget_bytes
    if not search.request.may(Offload) or allowed is None:
        return ""
    return f"; offload may take {format_bytes(allowed)} (offload_budget)"
