"""One case: predicted on a model that has no memory, then run on one that has."""

import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from benchmarks.gpu.cases import MODELS, OPTIMIZERS, Case
from torch import nn

from tightfit import Plan, TokenBatch, estimate, plan
from tightfit.devices.spec import DeviceSpec
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import build_optimizer
from tightfit.runtime.internals import clear_cublas_workspaces
from tightfit.runtime.simulation import NULL_CARD
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tightfit.tracing.build import build_dry
from tightfit.training.loop import resident_tensors

WARM_UP, TIMED = 2, 3  # steps; the second is the first with optimizer states from its start


@dataclass(frozen=True)
class Prediction:
    """What a case will take, and the plan if it is planned. `reserved_bytes` only on CUDA."""

    peak_bytes: int
    reserved_bytes: int | None
    step_seconds: float
    planning_seconds: float
    plan: Plan | None


def predict(case: Case, device: str) -> Prediction:
    """Ask tightfit, which sees shapes only: nothing of this touches the GPU."""
    began = time.perf_counter()
    chosen = MODELS[case.model]
    model = build_dry(chosen.build)
    batch = TokenBatch(case.size, case.length, chosen.vocabulary)
    how: dict[str, Any] = {
        "optimizer": OPTIMIZERS[case.optimizer],
        "precision": case.precision,
        "device": device,
        "grad_clip": case.grad_clip,
    }
    if case.levers is None or case.budget is None:
        made, step_figures = None, estimate(model, batch, **how).step_figures
    else:
        made = plan(model, batch, case.budget, levers=case.levers, **how)
        step_figures = made.planned
    took = time.perf_counter() - began
    return Prediction(step_figures.peak_bytes, step_figures.reserved_bytes, step_figures.step_seconds, took, made)


def run(case: Case, device: str, parent: Connection) -> None:
    """In a process of the case: say what is predicted, wait for the word, say what is measured. Errors are said too."""
    try:
        prediction = predict(case, device)
        parent.send({"predicted": as_figures(prediction)})
        parent.recv()
        parent.send({"measured": measure(case, prediction.plan, torch.device(device))})
    except Exception as error:
        parent.send({"error": "".join(traceback.format_exception_only(error)).strip()})


def as_figures(prediction: Prediction) -> dict[str, Any]:
    figures = {
        "peak_bytes": prediction.peak_bytes,
        "reserved_bytes": prediction.reserved_bytes,
        "step_seconds": prediction.step_seconds,
        "planning_seconds": prediction.planning_seconds,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if prediction.plan is not None:
        figures["budget_bytes"] = prediction.plan.budget_bytes
    return figures


def measure(case: Case, made: Plan | None, device: torch.device) -> dict[str, Any]:
    """Run the case's real step: allocated and reserved peak, median seconds."""
    fresh_device(device)
    torch.manual_seed(0)
    chosen = MODELS[case.model]
    with device:
        model = chosen.build()
    batch = {name: t.to(device) for name, t in TokenBatch(case.size, case.length, chosen.vocabulary).tensors().items()}
    optimizer = build_optimizer(OPTIMIZERS[case.optimizer], model.parameters())
    fresh_device(device)  # as a plan does when it is applied: what building the model left is given back
    levers: AbstractContextManager[Any] = nullcontext() if made is None else made.apply(model)
    micro_batches = 1 if made is None else made.micro_batches
    with levers, decisions():
        step = _step(case, model, batch, optimizer, micro_batches)
        for _ in range(WARM_UP):
            step()
        peak = measured_peak(step, resident_tensors(model, optimizer, batch))
        seconds = statistics.median(_seconds(step, device) for _ in range(TIMED))
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
    return {"peak_bytes": peak, "reserved_bytes": reserved, "step_seconds": seconds}


def decisions() -> AbstractContextManager[Any]:
    """On a null card, true results of what decides control flow: masks, labels that count. Nothing on a real card."""
    if NULL_CARD not in os.environ:
        return nullcontext()
    from tightfit.devices.nullcard.deciding import true_decisions

    return true_decisions()


def _step(case: Case, model: nn.Module, batch: Any, optimizer: Any, micro_batches: int) -> Callable[[], None]:
    parts = as_parts(split_batch(batch, micro_batches), model_loss)

    def step() -> None:
        forward_backward(model, parts, model_loss, case.precision)
        update(model, optimizer, StepSettings(case.precision, case.grad_clip))

    return step


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    _wait(device)
    began = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fresh_device(device: torch.device) -> None:
    """Nothing of an earlier case is left in the allocator."""
    gc.collect()
    if device.type == "cuda":
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def describe_device(spec: DeviceSpec) -> dict[str, Any]:
    """Of the device that predictions are for."""
    return {
        "name": spec.name,
        "memory_bytes": spec.memory_bytes,
        "compute_capability": spec.compute_capability,
        "measured": spec.is_measured,
    }
