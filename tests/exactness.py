"""Runs a model plain and frugal and compares everything that a training step leaves behind, bit by bit.

The user's own state (generators, caches, counters) is part of the outcome: a lever that computes the right gradients
and draws one random number too many is wrong on the next step.
"""

import gc
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from tightfit.memory.allocator import Rise, recorded_rise

Levers = Callable[[nn.Module], Any]  # applies levers to a model, returns a handle with undo()
Loss = Callable[[nn.Module, Any], torch.Tensor]
_OWN_PLACES = ("_parameters", "_buffers", "_modules", "forward")  # compared elsewhere, or the lever itself


@dataclass(frozen=True)
class Outcome:
    """What one training step left behind, each part by name."""

    loss: dict[str, Any]
    gradients: dict[str, Any]
    input_gradients: dict[str, Any]
    buffers: dict[str, Any]
    random_states: dict[str, Any]
    attributes: dict[str, Any]


def sum_of_squares(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The default loss: every element of the output matters, each by its own weight."""
    output = model(inputs)
    return (output * output.detach().cos()).sum()


def run(
    model: nn.Module,
    inputs: Any,
    loss: Loss = sum_of_squares,
    *,
    levers: Levers | None = None,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    seed: int = 0,
    times: int = 1,
) -> Outcome:
    """Forward and backward from the same random states; `levers` are applied before and undone after.

    With `times`, as often, one step after the other. Gradients add up.
    """
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    with levers(model) if levers is not None else nullcontext():
        for _ in range(times):
            value = loss(model, inputs)
            backward(value)
    return Outcome(
        loss={"loss": value.detach()},
        gradients={name: p.grad for name, p in model.named_parameters()},
        input_gradients={str(i): t.grad for i, t in enumerate(leaf_tensors(inputs))},
        buffers=dict(model.named_buffers()),
        random_states=random_states(model),
        attributes=attributes(model),
    )


def leaf_tensors(inputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, torch.Tensor) and leaf.is_leaf]


def random_states(model: nn.Module) -> dict[str, Any]:
    """Every generator's state after the step; a generator that a module owns is found by its attribute."""
    own = {
        f"{path}.{name}": value.get_state()
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }
    return {
        "torch": torch.get_rng_state(),
        **({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}),
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        **own,
    }


def attributes(model: nn.Module) -> dict[str, Any]:
    """What the forward left on the modules."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OWN_PLACES and not isinstance(value, torch.Generator) and "hooks" not in name
    }


def differences(plain: Outcome, frugal: Outcome) -> list[str]:
    """What is not bit-equal, one line each."""
    found = []
    for part in ("loss", "gradients", "input_gradients", "buffers", "random_states", "attributes"):
        left: Mapping[str, Any] = getattr(plain, part)
        right: Mapping[str, Any] = getattr(frugal, part)
        for name in sorted({*left, *right}):
            if name not in left or name not in right:
                found.append(f"{part}: {name} exists only in the {'plain' if name in left else 'frugal'} run")
                continue
            why = difference(left[name], right[name])
            if why:
                found.append(f"{part}: {name} {why}")
    return found


def difference(left: Any, right: Any) -> str:
    """Why two values are not the same, or nothing."""
    flat_left, spec_left = tree_flatten(left)
    flat_right, spec_right = tree_flatten(right)
    if spec_left != spec_right:
        return f"has another structure: {spec_left} and {spec_right}"
    for a, b in zip(flat_left, flat_right, strict=True):
        if type(a) is not type(b):
            return f"is a {type(a).__name__} in one run and a {type(b).__name__} in the other"
        if isinstance(a, torch.Tensor):
            why = tensor_difference(a.detach(), b.detach())
        elif isinstance(a, numpy.ndarray):
            why = "" if numpy.array_equal(a, b) else "differs"
        elif type(a).__module__ == "builtins":
            why = "" if a == b or callable(a) else f"is {a!r} and {b!r}"
        else:
            why = ""  # an object that belongs to one of the two models: modules, weak references
        if why:
            return why
    return ""


def tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return f"is {a.dtype} {tuple(a.shape)} {a.layout} and {b.dtype} {tuple(b.shape)} {b.layout}"
    if a.layout == torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return tensor_difference(a.indices(), b.indices()) or tensor_difference(a.values(), b.values())
    if torch.equal(bits(a), bits(b)):
        return ""
    worst = (a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item()
    return f"differs by up to {worst:.3g} (largest element {a.to(torch.complex128).abs().max().item():.3g})"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a NaN equals itself, and a negative zero is not a zero."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_bit_equal(plain: Outcome, frugal: Outcome) -> None:
    found = differences(plain, frugal)
    assert not found, f"{len(found)} values differ:\n  " + "\n  ".join(found[:12])


def allocator_record(step: Callable[[], Any]) -> Rise:
    """Bytes that the CPU allocator handed out during `step`.

    Garbage of earlier runs must not be freed inside the record, so the collector runs before and not during it.
    """
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            step()
    finally:
        gc.enable()
    return recorded_rise(profile)
