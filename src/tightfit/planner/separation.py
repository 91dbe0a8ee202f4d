"""Tries on real numbers whether the loss of a batch is the weighted sum of the losses of its samples.

Micro-batches promise the gradient of the whole batch. That holds if a sample's part of the loss depends on no other
sample. Many losses and models break it: negatives from the batch, batch statistics, means over groups, a router's
balance, offsets of packed sequences, numbers drawn for the whole batch. A dry run has no numbers to tell. So a few
samples run for real: all at once, then one by one, as micro-batches would run them. Losses, gradients and buffers are
compared. Dropout is off: that micro-batches drop other elements is known.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tightfit.errors import LeverError
from tightfit.levers.micro_batch import as_parts, as_tensors, batch_size, inseparable_samples, split_batch
from tightfit.levers.samples import mapped, on_device, rows_of, shortened, unlike
from tightfit.runtime.dropout import without_dropout
from tightfit.runtime.module_paths import plain_tensors_of
from tightfit.runtime.outside import outside_training
from tightfit.runtime.simulation import has_numbers
from tightfit.step import Batch, Loss, Part
from tightfit.tracing.outcomes import Generators, OpenNumbers, assumed
from tightfit.tracing.restore import Contents, random_states, untouched
from tightfit.tracing.twin import has_no_memory
from tightfit.tracing.unbacked import is_unbacked

LENGTH = 16  # tokens of each sample: the trial runs before a plan, so it must use little memory and time
MOST_SAMPLES = 32
FEW_BYTES = 1 << 26  # of the gradients that are compared
SAMPLED = 1 << 16  # numbers of each gradient, fewer where all of a trial's would take more than `FEW_BYTES`
LEAST_SAMPLED = 1 << 10
# Relative differences of sums in another order, of a tensor itself and of all gradients together. What couples samples
# weakly (a router's balance) moves some gradient by more. See notes/, "Samples apart".
ROUNDING = {torch.float64: (1e-5, 1e-7), torch.float32: (1e-4, 1e-6)}  # models cast to fp32 inside
ROUNDING_OF_HALVES = (5e-2, 5e-3)

Weights = Callable[[Sequence[Batch]], Sequence[Part]]


class Coupled(LeverError):
    """The samples of a batch cannot be computed apart."""


class CannotRun(Coupled):
    """Some samples of the batch, or one, cannot be computed at all."""


@dataclass(frozen=True)
class SampleLosses:
    """The numbers of samples together and of each apart: the loss, then gradients."""

    parts: Sequence[Batch]
    whole: Sequence[torch.Tensor]
    apart: Sequence[Sequence[torch.Tensor]]
    limits: tuple[float, float]

    @property
    def says_something(self) -> bool:
        return any(bool(numbers.any()) for numbers in (*self.whole, *(n for each in self.apart for n in each)))

    def adds_up(self, weigh: Weights) -> bool:
        """True if the samples' numbers, weighted, are those of all together, within rounding."""
        weights = {id(part.batch): part.weight for part in weigh(self.parts)}
        weighted = [
            (weights[id(part)], numbers)
            for part, numbers in zip(self.parts, self.apart, strict=True)
            if id(part) in weights
        ]
        differences, sizes = [], []
        for place, together in enumerate(self.whole):
            total = sum((weight * numbers[place] for weight, numbers in weighted), torch.zeros_like(together))
            differences.append(float((total - together).norm()))
            sizes.append(float(together.norm()) + sum(abs(w) * float(numbers[place].norm()) for w, numbers in weighted))
        of_itself, of_all = self.limits
        everything = math.hypot(*sizes[1:])
        return all(
            difference <= of_itself * size + (of_all * everything if place else 0.0)
            for place, (difference, size) in enumerate(zip(differences, sizes, strict=True))
        )


@outside_training()
def refuse_coupled(model: nn.Module, batch: Batch, loss: Loss) -> None:
    """Raise `Coupled`, with the reason, unless the samples of the batch can be computed apart.

    Parts have the weights of the lever micro-batches. Nothing of the model changes.
    """
    for trial in trials(model, batch, loss):
        if not trial.adds_up(lambda parts: as_parts(parts, loss)):
            if trial.adds_up(lambda parts: [Part(part, 1.0) for part in parts]):
                raise Coupled("the loss is a sum over samples, not a mean: say so by loss.reduction = 'sum'")
            raise Coupled(
                f"the loss couples the samples of a batch: {len(trial.parts)} samples have other gradients together "
                "than one by one, each weighted by its valid tokens (or by loss.count)"
            )


def can_be_tried(model: nn.Module, batch: Batch) -> bool:
    """True if model and batch have numbers to compute with."""
    batch = as_tensors(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    held = (*model.parameters(), *model.buffers(), *(v for v in values if isinstance(v, torch.Tensor)))
    return not any(has_no_memory(each) or is_unbacked(each) or not has_numbers(each) for each in held)


def trials(model: nn.Module, batch: Batch, loss: Loss) -> Iterator[SampleLosses]:
    """Trials of a batch's samples as they are, with unlike numbers of labels, and one of them twice. Raises `Coupled`.

    Sequences of tokens are cut. A loss that refuses such samples is tried with them whole. They are tried where the
    model is: a batch that is planned for may be on the host.
    """
    whole = as_tensors(batch)
    rows = _rows(whole, loss)
    plain = rows_of(whole, rows)
    weight = next(model.parameters(), None)
    if weight is not None:
        plain = on_device(plain, weight.device)
    short = shortened(plain, LENGTH)
    yield from _trials(model, plain, short, loss)


def _trials(model: nn.Module, plain: Batch, short: Batch, loss: Loss) -> Iterator[SampleLosses]:
    said: Coupled | None = None
    found = False
    uneven = unlike(short)
    # Counts within the batch (weights of classes, unique values) are all 1 where no two samples are alike.
    for samples in (*(() if uneven is short else (uneven,)), short, _one_twice(short, loss)):
        try:
            trial = _at_best(model, samples, loss)
        except CannotRun as error:
            said = error.with_traceback(None)  # it has this frame, which would keep the model with it
            continue
        if trial.says_something:
            found = True
            yield trial
    if found:
        return
    trial = _at_best(model, plain, loss)
    if not trial.says_something:
        raise said or Coupled("the loss of the samples that were tried is 0, and so are its gradients")
    yield trial


def _at_best(model: nn.Module, samples: Batch, loss: Loss) -> SampleLosses:
    """A trial in fp64, on a copy of a small model that runs so; else as the model is.

    What couples samples weakly is told from rounding by more digits only. The copy is in the host's memory: plans are
    made while a training runs too, and a budget is for its card.
    """
    held = (*model.parameters(), *model.buffers())
    is_small = sum(tensor.nbytes for tensor in held) <= FEW_BYTES
    if is_small and all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in held):
        outside = torch.get_default_dtype()
        try:
            exact = _exact_copy(model)
            torch.set_default_dtype(torch.float64)  # of what a loss makes itself
            return try_apart(exact, tree_map_only(torch.Tensor, _doubled_on_host, samples), loss)
        except CannotRun:
            pass  # a loss that names a dtype or a device: the trial as the model is says why, if that fails too
        except (RuntimeError, TypeError):
            pass  # a model that cannot be copied
        finally:
            torch.set_default_dtype(outside)
    return try_apart(model, samples, loss)


def _exact_copy(model: nn.Module) -> nn.Module:
    """A copy in fp64 in the host's memory, of which nothing was on a card meanwhile."""
    plain = [tensor for module in model.modules() for _, tensors in plain_tensors_of(module) for tensor in tensors]
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *(t for t in plain if not t.requires_grad)):
        copied = _doubled_on_host(tensor.detach())
        copied = copied.clone() if copied.data_ptr() == tensor.data_ptr() else copied
        is_parameter = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return copy.deepcopy(model, made)


def _doubled_on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    return tensor.double() if tensor.is_floating_point() else tensor


def try_apart(model: nn.Module, samples: Batch, loss: Loss) -> SampleLosses:
    """Run samples together, then each apart. Raises `Coupled` for what needs no comparison of numbers."""
    parts = split_batch(samples, inseparable_samples(samples, loss))
    compared = _compared(model)
    kept = partial(untouched, model, samples, loss, weights=_can_be_kept(model))
    most = max(FEW_BYTES // (8 * len(compared) * (len(parts) + 1)), LEAST_SAMPLED) if compared else SAMPLED
    numbers = partial(_numbers, model, loss=loss, compared=compared, sampled=min(SAMPLED, most))
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        without_dropout(model),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a single sample: the training warns of its own batches
        with kept() as attributes:
            before = random_states(attributes)
            whole = numbers(mapped(samples, _copied))
            has_drawn = random_states(attributes) != before
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with kept():
            # One after the other, as micro-batches run: what forward leaves in a buffer is there for the next.
            apart = [numbers(mapped(part, _copied)) for part in parts]
            moved = [name for name, buffer in model.named_buffers() if _differs(buffers[name], buffer)]
    if has_drawn and _draws_matter(kept, samples, numbers, whole):
        raise Coupled("forward or loss draw random numbers, beside dropout, and parts would draw other ones")
    if moved:
        raise Coupled(f"forward computes the buffer {moved[0]} from the whole batch, and parts would leave another one")
    narrow = {numbers.dtype for numbers in compared} | {tensor.dtype for tensor in model.parameters()}
    limits = min((ROUNDING.get(dtype, ROUNDING_OF_HALVES) for dtype in narrow if dtype.is_floating_point), key=_strict)
    return SampleLosses(parts, whole, apart, limits)


def _can_be_kept(model: nn.Module) -> bool:
    """True if the host has room for a copy of the weights, into which a forward may write (a moving average)."""
    on_host = sum(parameter.nbytes for parameter in model.parameters())
    return on_host <= psutil.virtual_memory().available // 4


def _draws_matter(
    kept: Callable[[], AbstractContextManager[Contents]],
    samples: Batch,
    numbers: Callable[[Batch], list[torch.Tensor]],
    before: Sequence[torch.Tensor],
) -> bool:
    """True if the loss or a gradient changes with the numbers that the random generators give."""
    for draws in filter(lambda numbers: numbers.is_drawn, OpenNumbers):
        with kept() as attributes, assumed(draws):
            Generators(attributes).begin()
            try:
                found = numbers(mapped(samples, _copied))
            except CannotRun:  # with every layer dropped no gradient is left
                return True
            if not all(torch.equal(one, other) for one, other in zip(before, found, strict=True)):
                return True
    return False


def _numbers(
    model: nn.Module, samples: Batch, *, loss: Loss, compared: Sequence[nn.Parameter], sampled: int
) -> list[torch.Tensor]:
    """The loss of samples, and at most so many numbers of each gradient, in fp64 on the CPU."""
    # A loss for whole batches may raise anything for a single sample, or for samples whose labels are ignored.
    try:
        value = loss(model, samples)
        gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(value, compared, allow_unused=True)
    except Exception as error:
        if ".grad()" not in str(error):  # a reentrant checkpoint has no gradients to compare
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CannotRun(f"the loss of a part of its batch cannot be computed ({reason})") from error
        gradients = []
    numbers = [value.detach().double().cpu().reshape(-1)]
    for parameter, gradient in zip(compared, gradients, strict=False):
        flat = torch.zeros_like(parameter) if gradient is None else gradient
        flat = (flat.to_dense() if flat.is_sparse else flat).detach().reshape(-1)
        picked = flat[:: -(-flat.numel() // sampled) or 1]
        numbers.append(picked.to("cpu", torch.float64, copy=True))  # a view would hold the whole gradient
    if not all(bool(each.isfinite().all()) for each in numbers):
        raise CannotRun("the loss of a part of its batch is not a finite number, or its gradient is not")
    return numbers


def _compared(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters whose gradients are compared: small ones, and the smallest in any case."""
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.nbytes)
    bytes_before = itertools.accumulate((p.nbytes for p in trained), initial=0)
    return [p for p, before in zip(trained, bytes_before, strict=False) if before + p.nbytes <= FEW_BYTES or not before]


def _rows(batch: Batch, loss: Loss) -> list[int]:
    """The rows of the samples that are tried.

    If there are many, the first ones and then one in so many: some two of them are any distance apart.
    """
    size = inseparable_samples(batch, loss)
    together = batch_size(batch) // size
    step = max(1, math.isqrt(max(size - 1, 0)) + 1) if size > MOST_SAMPLES else 1
    samples = sorted({*range(step), *range(0, size, step)})[:MOST_SAMPLES] if step > 1 else range(size)
    return [sample * together + row for sample in samples for row in range(together)]


def _one_twice(samples: Batch, loss: Loss) -> Batch:
    """The first sample twice, and the second one."""
    together = batch_size(samples) // inseparable_samples(samples, loss)
    return rows_of(samples, [*range(together), *range(together), *range(together, batch_size(samples))][: 3 * together])


def _differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two contents of a buffer are other numbers. Counters of calls are no numbers of the step."""
    if not one.is_floating_point():
        return False
    limit = ROUNDING.get(one.dtype, ROUNDING_OF_HALVES)[0]
    return not torch.allclose(one, other, rtol=limit, atol=limit * float(one.abs().max()) if one.numel() else 0.0)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _strict(limits: tuple[float, float]) -> float:
    return -limits[0]
