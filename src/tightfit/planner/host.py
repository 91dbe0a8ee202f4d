"""The host's memory of a training: this process, what a step puts there, and weights on their way to a card."""

import torch

from tightfit.devices.libraries import library_bytes
from tightfit.errors import CannotFit
from tightfit.levers.stream import streamable_weights
from tightfit.memory.allocator import memory_of
from tightfit.memory.process import process_bytes, resident_bytes
from tightfit.optim.by_name import state_tensors
from tightfit.planner.levers import Offload, Stream
from tightfit.planner.outcome import PlanRecord
from tightfit.planner.records import HostMemory
from tightfit.planner.request import Request
from tightfit.runtime.nested import tensors_in
from tightfit.tracing.record import Category
from tightfit.tracing.twin import has_no_memory
from tightfit.tracing.unbacked import is_unbacked
from tightfit.units import format_bytes, parse_bytes

# What leaves the host's memory, by what holds most of it; in the words of a configuration.
_WAYS_OUT = {
    "weights while loading": "weights in bf16 or fewer bits (model.dtype, model.adapter.base)",
    str(
        Category.OPTIMIZER_STATE
    ): "an optimizer whose states are on the card or smaller (offloaded_adamw:0.5, adamw8bit)",
    str(Category.GRADIENT): "an optimizer whose states and gradients are on the card (adamw8bit)",
    str(
        Category.ACTIVATION
    ): "a plan that recomputes instead of offloading (levers without offload), or a smaller batch",
    "checkpoint": "checkpoint.in_background: false",
}


GROWN_BYTES = 8 << 20  # what a search has left in the process is no part of a training


def host_of(request: Request, stream: Stream | None = None, before: int | None = None) -> HostMemory:
    """The memory of the host that a training would take if this process trained, without the tensors of its step.

    `stream` is the lever of its plan, and `before` are the resident bytes of the process before the search for that.
    Ranks load their shards one by one, which is not counted.
    """
    on_card = request.device.kind != "cpu"
    has_grown = before is not None and resident_bytes() - before > GROWN_BYTES
    process = process_bytes(_held(request), tidied=has_grown or request.host_budget is not None)
    if on_card:
        process += library_bytes()
    return HostMemory(process, loaded_bytes(request, stream) if on_card and request.world is None else 0)


def within_host(plan: PlanRecord, request: Request) -> tuple[Request, int] | None:
    """None if a plan is within the host's budget, else the request and the budget to plan again with.

    On a CPU the step gets what the process leaves. On a card less is offloaded, or streamed weights are in a file.
    Raises `CannotFit` if that is no way.
    """
    assert request.host_budget is not None, "somebody set a budget"
    excess = plan.host_peak_bytes - parse_bytes(request.host_budget)
    if excess <= 0:
        return None
    if request.device.kind == "cpu":
        if excess >= plan.peak_bytes:
            raise host_cannot_fit(plan, request)
        return request, min(plan.budget_bytes, plan.peak_bytes - excess)
    offload, stream = plan.lever(Offload), plan.lever(Stream)
    if offload is not None and offload.host and offload.bytes > excess:
        return request.but(offload_budget=offload.bytes - excess), plan.budget_bytes
    if stream is not None and stream.folder is None:
        return request.but(weights_in_file=True), plan.budget_bytes
    raise host_cannot_fit(plan, request)


def host_cannot_fit(plan: PlanRecord, request: Request) -> CannotFit:
    """The error of a plan whose host has too little memory by the request's budget."""
    assert request.host_budget is not None, "somebody set a budget"
    held = plan.host_by_category
    most = max(held, key=held.__getitem__)
    way = f", or take {_WAYS_OUT[most]}" if most in _WAYS_OUT else ", or a smaller model or batch"
    peak = plan.host_peak_bytes
    return CannotFit(
        f"{format_bytes(parse_bytes(request.host_budget))} of host memory cannot fit: the training takes "
        f"{format_bytes(peak)} ({peak} bytes) there, most of it {format_bytes(held[most])} of {most}: raise host_budget"
        f"{way}",
        peak,
    )


def loaded_bytes(request: Request, stream: Stream | None = None) -> int:
    """Bytes of the weights and buffers that lie in the host's memory before they are moved to a card.

    Of those that stream from a file, what is not in memory yet is read from the model's own file there, tensor by
    tensor.
    """
    tensors = [*request.model.parameters(), *request.model.buffers()]
    found = {id(part): part for tensor in tensors for part in memory_of(tensor)}
    if stream is not None and stream.folder is not None:
        for weights in streamable_weights(request.model, stream.paths, trained=stream.trained):
            for weight in weights:
                if has_no_memory(weight) or not weight.untyped_storage().resizable():  # a map of its file
                    found.pop(id(weight), None)
    return sum(part.nbytes for part in found.values())


def _held(request: Request) -> list[torch.Tensor]:
    """The tensors of the step that this process has already."""
    model, optimizer = request.step.model, request.optimizer
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = state_tensors(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else []
    held = [*model.parameters(), *model.buffers(), *gradients, *states, *tensors_in(request.step.batch)]
    return [tensor for tensor in held if not (has_no_memory(tensor) or is_unbacked(tensor))]
