"""`tightfit train` on several cards with true values, disturbed in the middle of a step. torchrun runs it.

    torchrun --nproc-per-node 2 trained_ranks.py DISTURBED train.yaml [--resume] [key=value ...]

DISTURBED is JSON: what happens to a rank, in which of its calls of forward and backward (from 1 on; a rank that stands
in for itself calls them too):

    {"1": {"full": {"3": 40}}}           the card is full from that operator on, until memory has run out once
    {"1": {"full in update": {"3": 5}}}  the same in a call of the optimizer's step
    {"1": {"room": {"3": 1048576}}}      from that call on, another process leaves so many bytes of the card
    {"0": {"signal": {"3": [40, 15]}}}   at that operator a signal comes: SIGTERM

A rank that ends writes a line of JSON: how often its card was full.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from taken_memory import FullFrom, held_outside
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit.training.sharded.steps as sharded
import tightfit.training.stepper as alone
from quick_trainings import leave_out_pictures
from tightfit.devices.nullcard.values import true_values
from tightfit.training.stepper import StepUnderWay


class SignalAt(TorchDispatchMode):
    """A signal to this process, at an operator."""

    def __init__(self, number: int, signal: int):
        super().__init__()
        self._left, self._signal = number, signal

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._left == 0:
            os.kill(os.getpid(), self._signal)
        self._left -= 1
        return func(*args, **(kwargs or {}))


class Disturbed:
    """In the place of a function: some of its calls, by their numbers, run in contexts."""

    def __init__(self, own: Callable[..., Any], contexts: Mapping[int, Callable[[], Any]]):
        self._own, self._contexts = own, contexts
        self._calls = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._calls += 1
        with self._contexts.get(self._calls, nullcontext)():
            return self._own(*arguments, **options)


def main(disturbed: str, *words: str) -> None:
    rank = os.environ["RANK"]
    wanted = json.loads(disturbed).get(rank, {})
    fulls: list[FullFrom] = []

    def full(number: int) -> FullFrom:
        fulls.append(FullFrom(number))
        return fulls[-1]

    def room(left_bytes: int) -> Any:
        torch.cuda.empty_cache()
        held_outside(left_bytes)
        return nullcontext()

    def contexts(name: str, make: Callable[..., Any]) -> dict[int, Callable[[], Any]]:
        return {int(call): partial(make, at) for call, at in wanted.get(name, {}).items()}

    signals = contexts("signal", lambda given: SignalAt(*given))
    in_gradients = Disturbed(alone.forward_backward, contexts("full", full) | contexts("room", room) | signals)
    in_update = Disturbed(StepUnderWay.update, contexts("full in update", full))
    sharded.forward_backward = alone.forward_backward = in_gradients
    StepUnderWay.update = lambda *arguments: in_update(*arguments)
    leave_out_pictures(pytest.MonkeyPatch())
    sys.argv = ["tightfit", "train", *words]
    try:
        with true_values():
            runpy.run_module("tightfit", run_name="__main__")
    finally:
        print(json.dumps({"rank": int(rank), "full": sum(mode.raised for mode in fulls)}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
