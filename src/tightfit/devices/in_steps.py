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
from tightfit.devices.own_time import TimedBlock
from tightfit.devices.spec import DeviceSpec
from tightfit.devices.work import work_of
from tightfit.runtime.operators import tensors_among, traits_of

WIDTH, HEADS, BLOCKS, VOCABULARY, BATCH = 256, 4, 3, 6400, (4, 256)
SAMPLES = 2  # steps each time, after one that warms up
MOST = 3.0  # beyond this the machine was busy with something else


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.Sequential(*(TimedBlock(WIDTH, HEADS) for _ in range(BLOCKS)))

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


class StepTimes:
    """Steps of a small decoder, run now and again: a machine's speed changes from one second to the next.

    Mutable: the seconds measured so far, by whether the step was in bf16. Does not use the user's random generators.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would seed the cards too
            self.model = _Decoder()
            self.tokens = torch.randint(VOCABULARY, BATCH)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seconds: dict[bool, list[float]] = {False: [], True: []}

    @torch.enable_grad()
    def sample(self) -> None:
        """Time a few steps in each precision."""
        for half, seconds in self.seconds.items():
            self.step(half)
            for _ in range(SAMPLES):
                began = time.perf_counter()
                self.step(half)
                seconds.append(time.perf_counter() - began)

    def step(self, half: bool) -> None:
        with _precision(half):
            logits = self.model(self.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.enable_grad()
    def priced(self, law: MeasuredLaw, half: bool) -> dict[str, float]:
        """Predicted seconds of a step's operators, by the keys of `DeviceSpec.in_steps`."""
        with _Prices(law) as prices:
            self.step(half)
        return prices.seconds

    def shares(self, spec: DeviceSpec) -> dict[str, float]:
        """The figure `DeviceSpec.in_steps` of a CPU with these figures, from the median steps."""
        law = MeasuredLaw(spec)
        measured = {half: statistics.median(seconds) for half, seconds in self.seconds.items()}
        priced = {half: self.priced(law, half) for half in (False, True)}
        full = _bounded(measured[False] / priced[False]["float32"])
        rest = measured[True] - full * priced[True]["float32"]
        return {"float32": full, "half": _bounded(rest / priced[True]["half"])}


def _bounded(share: float) -> float:
    return min(max(share, 1 / MOST), MOST)


def _precision(half: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
