"""Measures the least seconds of many small calls, in turns."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from tightfit.devices.spec import Kind
from tightfit.memory.failure import is_out_of_memory

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

LEAST_SPAN = 5e-4  # seconds: short calls are repeated at least this long under one reading of the clock
MOST_REPEATS = 100
SETTLED = 0.99  # a round still improves if it lowers the sum of least times below this share of its last value


def fastest(calls: Mapping[Key, Call], kind: Kind, seconds: float, rounds: int) -> dict[Key, float]:
    """The least seconds of each call, over interleaved rounds.

    Runs at least two and at most `rounds` rounds, for about `seconds`, and up to twice as long while times still fall.
    """
    # On a card, a call that runs out of memory is left out: other calls hold theirs by then.
    # The least and not the median: another process can only make a call slower, and does so for a whole time slice.
    began = time.perf_counter()
    span = _span_cuda if kind == "cuda" else _span_cpu
    repeats = {}
    best = dict.fromkeys(calls, math.inf)
    for key, call in calls.items():
        with _left_out(key, best):
            call()
            about = max(span(call, 1), LEAST_SPAN / MOST_REPEATS)
            repeats[key] = max(1, round(LEAST_SPAN / about))
    for done in range(rounds):
        total = sum(best.values())
        for key in list(best):
            with _left_out(key, best):
                best[key] = min(best[key], span(calls[key], repeats[key]))
        settled = sum(best.values()) > SETTLED * total
        if done > 0 and time.perf_counter() - began > (seconds if settled else 2 * seconds):
            break
    return best


@contextmanager
def _left_out(key: Key, best: dict[Key, float]) -> Iterator[None]:
    """A context in which a call that runs out of memory loses its place in `best`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        del best[key]


def _span_cpu(call: Call, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def _span_cuda(call: Call, repeats: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    for _ in range(repeats):
        call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / repeats
