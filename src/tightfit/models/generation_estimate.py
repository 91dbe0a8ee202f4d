"""Predicts the memory and the time of generating text with a model, before it runs.

The dry run is of `tightfit.models.generation`, which `tightfit generate` runs. Every token is a forward of its own, so
a long generation is not run dry in full: the prompt and the first tokens are, then the tokens between are read at once,
which leaves the same cache, and then the last tokens are. Memory grows from token to token, or stays, so the peak is
among those.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.devices.cost import CostModel
from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import InputError, ModelError
from tightfit.models import generation
from tightfit.models.generation import CHUNK_SIZE, Generation
from tightfit.models.loading import position_limit
from tightfit.models.mode import evaluating
from tightfit.ops.weights.low_bit import count_weights
from tightfit.planner.any_code.records import GenerationRecord
from tightfit.planner.any_code.traced import fits_once
from tightfit.planner.arguments import refuse_compiled
from tightfit.planner.estimates import assumption_sentences
from tightfit.planner.request import role_of
from tightfit.planner.step_figures import dtypes_of, step_figures
from tightfit.planner.wrapped import refuse_distributed
from tightfit.step import Precision, autocast
from tightfit.tracing.code_run import code_run_dry
from tightfit.tracing.cuda.replay import as_allocated
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.reached import Reached
from tightfit.tracing.record import Assumption, Category, StepTrace, StorageRecord
from tightfit.tracing.twin import real_tensors

CACHE = "keys and values"
AT_EACH_END = 2  # decode steps that are run dry in full at the beginning and at the end
# One more before those at the end: caches with a window hold the memory of the last piece until the next token.
SETTLING = 1


@real_tensors()
def estimate_generation(
    model: nn.Module,
    input_ids: Tensor,
    *,
    new_tokens: int,
    precision: Precision = "fp32",
    device: Any = None,
    chunk_size: int = CHUNK_SIZE,
    temperature: float = 0.0,
) -> GenerationRecord:
    """Predict the peak memory and the time of `generate(model, input_ids, max_new_tokens=new_tokens, temperature=...)`.

    Changes nothing of the model. Raises `InputError` for more tokens than the model has positions, `ModelError` for a
    model that generates no text this way, and `TraceError` for an operator that cannot run dry.
    """
    _check(model, input_ids, new_tokens)
    spec = lookup(device)
    role = role_of(spec)
    with code_run_dry(Reached.of_call(model, input_ids), CostModel(spec).operator_seconds, role) as dry:

        def label(cached: list[Tensor]) -> None:
            for tensor in cached:
                dry.ledger.label(tensor, Category.ACTIVATION, CACHE)

        running = Generation(
            model,
            input_ids,
            max_new_tokens=new_tokens,
            chunk_size=chunk_size,
            temperature=temperature,
            on_read=label,
        )
        ids, ends, left_out = input_ids, [0], (0, 0)
        skipped = max(new_tokens - 1 - 2 * AT_EACH_END - SETTLING, 0)
        with torch.no_grad(), evaluating(model), autocast(precision, "cpu"):
            while ids.shape[1] < input_ids.shape[1] + new_tokens and not running.is_over:
                if skipped and len(ends) == 2 + AT_EACH_END and left_out == (0, 0):
                    begun = len(dry.operators)
                    ids = torch.cat((ids, ids.new_zeros(len(ids), skipped)), dim=1)
                    if running.reading.read is not None:  # without a cache, every token reads the whole text again
                        running.reading.following(ids[:, :-1])
                    ids = running.extended(ids)
                    left_out = begun, len(dry.operators)
                ids = running.extended(ids)
                ends.append(len(dry.operators))
        trace = dry.trace()
    ends = [end if end <= left_out[0] else end - (left_out[1] - left_out[0]) for end in ends]
    trace = without(trace, *left_out)
    if role is not None:
        trace = as_allocated(trace, once=True)
    return _record(model, input_ids, new_tokens, precision, chunk_size, spec, trace, ends)


def _check(model: nn.Module, input_ids: Tensor, new_tokens: int) -> None:
    name = type(model).__name__
    refuse_compiled(model)
    refuse_distributed(model, "an estimate of inference")
    if new_tokens < 1:
        raise InputError(f"new_tokens is {new_tokens}, wanted at least 1")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder and a decoder: an estimate of inference is for decoder-only models")
    limit, length = position_limit(model), input_ids.shape[1]
    if limit is not None and length + new_tokens > limit:
        raise InputError(
            f"a prompt of {length} tokens and {new_tokens} new ones are more than the {limit} positions of {name}: "
            "lower one of them"
        )


def without(trace: StepTrace, first: int, end: int) -> StepTrace:
    """The trace without the operators from `first` up to, not including, `end`, as if they took no time."""
    if first == end:
        return trace
    gone = end - first

    def moved(time: int) -> int:
        return time if time <= first else max(first, time - gone)

    def kept(storage: StorageRecord) -> StorageRecord:
        died = None if storage.died is None else moved(storage.died)
        operator = None if storage.operator is None else moved(storage.operator)
        return storage._replace(born=moved(storage.born), died=died, operator=operator)

    return replace(
        trace,
        operators=trace.operators[:first] + trace.operators[end:],
        levels=trace.levels[:first] + trace.levels[end:],
        starts=trace.starts[:first] + trace.starts[end:],
        storages=tuple(map(kept, trace.storages)),
        repeated=(0, len(trace.operators) - gone),
        calls=(),
    )


def _record(
    model: nn.Module,
    input_ids: Tensor,
    new_tokens: int,
    precision: str,
    chunk_size: int,
    device: DeviceSpec,
    trace: StepTrace,
    ends: Sequence[int],
) -> GenerationRecord:
    """The figures of a trace whose tokens end at `ends[1:]`."""
    levels = trace.levels
    prefill, steps = ends[1], ends[2:]
    seconds = [sum(o.seconds for o in trace.operators[a:b]) for a, b in zip(ends[1:], steps, strict=False)]
    decoding = _sum_of_all(seconds, new_tokens - 1)
    size = len(input_ids)
    last = len(levels) - 1
    return GenerationRecord(
        figures=step_figures(trace),
        by_category=_categories(trace),
        prefill_peak_bytes=max(levels[:prefill]),
        decode_peak_bytes=max(levels[prefill:], default=None),
        weights_bytes=trace.by_category(last)[Category.PARAMETER],
        cache_bytes=_cached(trace, last),
        prefill_seconds=sum(o.seconds for o in trace.operators[:prefill]),
        first_token_seconds=seconds[0] if seconds else None,
        last_token_seconds=seconds[-1] if seconds else None,
        decode_seconds=decoding,
        tokens_per_second=size * (new_tokens - 1) / decoding if decoding else None,
        seconds_from=_source(device),
        batch_size=size,
        prompt_tokens=input_ids.shape[1],
        new_tokens=new_tokens,
        chunk_size=chunk_size,
        parameters=count_weights(model),
        weights=dtypes_of(model),
        precision=precision,
        device=device.name,
        device_bytes=device.memory_bytes,
        context_bytes=0 if device.kind == "cpu" else CONTEXT_BYTES,
        fits=fits_once(trace, device),
        assumptions=assumption_sentences(a for a in trace.assumptions if not _is_a_drawn_token(a)),
    )


def _sum_of_all(seconds: Sequence[float], count: int) -> float:
    """Seconds of `count` steps, of which only some at both ends are known: the others lie on a line between them."""
    if count == len(seconds):
        return sum(seconds)
    before, after = seconds[AT_EACH_END - 1], seconds[AT_EACH_END]
    return sum(seconds) + (count - len(seconds)) * (before + after) / 2


def _categories(trace: StepTrace) -> dict[str, int]:
    """Bytes at the peak by what they are for."""
    by_category = trace.by_category()
    cache = _cached(trace, trace.peak_index)
    weights, inputs = by_category[Category.PARAMETER], by_category[Category.INPUT]
    activations = trace.peak_bytes - weights - inputs - cache
    return {"weights": weights, CACHE: cache, "activations": activations, "inputs": inputs}


def _cached(trace: StepTrace, index: int) -> int:
    return sum(storage.bytes for storage in trace.alive_at(index) if storage.name == CACHE)


def _is_a_drawn_token(assumption: Assumption) -> bool:
    """True if an assumption is the token that the generation draws: no size depends on it."""
    return assumption.where.startswith(f"{Path(generation.__file__)}:")


def _source(device: DeviceSpec) -> str:
    if device.roofline is None:
        return "derived from this device's calibration, operator by operator; no generation was measured"
    return "derived from published rates by a roofline, operator by operator; no generation was measured"
