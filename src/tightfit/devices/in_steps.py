"""Measures how much longer a CPU takes for a training step than for the step's operators, timed one by one.

Within a step a processor runs for seconds and not for milliseconds, the allocator returns memory to the system and gets
it back, and operands come from wherever the operators before left them. Timing one operator shows none of this. So
steps of a small decoder run here for real, in fp32 and in bf16.
"""

import statistics
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.devices.cost import MeasuredLaw
from tightfit.devices.own_time import Block
from tightfit.devices.spec import DeviceSpec
from tightfit.devices.work import work_of
from tightfit.runtime.operators import tensors_among, traits_of

WIDTH, HEADS, BLOCKS, VOCABULARY, BATCH = 256, 4, 3, 6400, (4, 256)
WARM_UP, ROUNDS = 2, 5
MOST = 3.0  # beyond this the machine was busy with something else


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(BLOCKS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class _Prices(TorchDispatchMode):
    """Sums the predicted seconds of the operators that run, by the key of `DeviceSpec.in_steps`."""

    def __init__(self, law: MeasuredLaw):
        super().__init__()
        self.law, self.seconds = law, defaultdict[str, float](float)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = tuple(tensors_among((args, kwargs or {})))
        shapes = [_Shape(tensor) for tensor in inputs]  # before an operator changes them in place
        out = func(*args, **(kwargs or {}))
        if not traits_of(func).is_view:
            constants = tuple(a for a in args if not isinstance(a, torch.Tensor))
            work = work_of(str(func), shapes, [_Shape(t) for t in tensors_among((out,))], constants)
            self.seconds[work.precision] += self.law.seconds(work)
        return out


class _Shape:
    def __init__(self, tensor: torch.Tensor):
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Training:
    """A decoder, its optimizer, and steps of both."""

    def __init__(self) -> None:
        self.model = _Decoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.randint(VOCABULARY, BATCH)

    def step(self, half: bool) -> None:
        with _precision(half):
            logits = self.model(self.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, half: bool) -> float:
        """The median step."""
        spent = []
        for _ in range(WARM_UP + ROUNDS):
            began = time.perf_counter()
            self.step(half)
            spent.append(time.perf_counter() - began)
        return statistics.median(spent[WARM_UP:])

    def priced(self, law: MeasuredLaw, half: bool) -> dict[str, float]:
        with _Prices(law) as prices:
            self.step(half)
        return prices.seconds


def in_steps(spec: DeviceSpec) -> dict[str, float]:
    """The figure `DeviceSpec.in_steps` of a CPU with these figures, for the present number of threads.

    Does not use the user's random generators.
    """
    law = MeasuredLaw(spec)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        training = _Training()
        measured = {half: training.seconds(half) for half in (False, True)}
        priced = {half: training.priced(law, half) for half in (False, True)}
    full = _bounded(measured[False] / priced[False]["float32"])
    rest = measured[True] - full * priced[True]["float32"]
    return {"float32": full, "half": _bounded(rest / priced[True]["half"])}


def _bounded(share: float) -> float:
    return min(max(share, 1 / MOST), MOST)


def _precision(half: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
