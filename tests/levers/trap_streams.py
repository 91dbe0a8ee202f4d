"""The ways to stream that every trap is tried with, and which of its weights are frozen for that."""

import functools
import tempfile

from torch import nn

from tightfit.levers.handle import Applied
from tightfit.levers.offload import offload
from tightfit.levers.recompute import recompute
from tightfit.levers.recompute.lever import matching_modules
from tightfit.levers.stream import stream


def freeze(model: nn.Module) -> nn.Module:
    """Freeze every weight of the blocks but the last of each block that has several: those stay adapters."""
    kept = set()
    for path in matching_modules(model, "layers.*"):
        parameters = list(model.get_submodule(path).parameters())
        kept.update(map(id, parameters[1:][-1:]))
    for path in matching_modules(model, "layers.*"):
        for parameter in model.get_submodule(path).parameters():
            if id(parameter) not in kept and parameter.is_leaf:
                parameter.requires_grad_(False)
    return model


def has_frozen(model: nn.Module) -> bool:
    """True if each block has frozen weights that it does not share."""
    from tightfit.levers.stream.lever import streamable_weights

    return all(streamable_weights(model, matching_modules(model, "layers.*")))


def inside(lever, model: nn.Module) -> Applied:
    """Another lever first, then stream."""
    return Applied([lever(model), stream(model, "layers.*")])


def outside(lever, model: nn.Module) -> Applied:
    """Stream first, then another lever."""
    return Applied([stream(model, "layers.*"), lever(model)])


_recompute = functools.partial(recompute, pattern="layers.*")
_offload = functools.partial(offload, pattern="layers.*", smallest=1)

STREAMS = {
    "alone": functools.partial(stream, pattern="layers.*"),
    "none ahead": functools.partial(stream, pattern="layers.*", ahead=0),
    "from a file": functools.partial(stream, pattern="layers.*", tier=tempfile.gettempdir()),
    "around recompute": functools.partial(inside, _recompute),
    "within recompute": functools.partial(outside, _recompute),
    "around offload": functools.partial(inside, _offload),
}
