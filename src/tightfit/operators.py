"""What the dispatcher tells about an ATen operator, looked up once for each."""

from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

# Views in all but name: the result shares its input's storage although the schema does not say so.
_SILENT_VIEWS = frozenset({aten._unsafe_view.default, aten.lift_fresh.default})

# They write into arguments that their schema does not mark as written (running statistics of batch norm).
_HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})

# Random draws into a fresh buffer whose schema carries no `nondeterministic_seeded` tag in every release.
_RANDOM_WITHOUT_TAG = frozenset(
    {"aten::rrelu_with_noise", "aten::rrelu_with_noise_", "aten::rrelu_with_noise_functional"}
)


@dataclass(frozen=True, slots=True)
class Traits:
    """What matters here about one operator overload."""

    name: str  # "aten.mm.default"
    is_view: bool  # every result shares the storage of an argument, nothing is computed
    written: tuple[tuple[int, str], ...]  # position and name of the arguments it writes into
    returns_written: bool  # every result is one of the written arguments
    is_random: bool  # draws from a generator
    is_uninitialised: bool  # returns memory nobody has written yet


_known: dict[Any, Traits] = {}


def traits_of(operator: Any) -> Traits:
    """The traits of an `OpOverload`."""
    traits = _known.get(operator)
    if traits is None:
        traits = _known[operator] = _inspect(operator)
    return traits


def _inspect(operator: Any) -> Traits:
    schema = operator._schema
    hidden = _HIDDEN_WRITES.get(schema.name, ())
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden
    )
    aliased = [result.alias_info is not None for result in schema.returns]
    return Traits(
        name=str(operator),
        is_view=operator in _SILENT_VIEWS or (not written and bool(aliased) and any(aliased)),
        written=written,
        returns_written=bool(written) and all(aliased),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags or schema.name in _RANDOM_WITHOUT_TAG,
        is_uninitialised=operator.namespace == "aten" and operator._opname in _UNINITIALISED,
    )


def written_arguments(traits: Traits, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments of this call that the operator writes into (tensors or lists of tensors)."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in traits.written]


def is_index(result: Any) -> bool:
    """Whether a result is a tensor of integers: what was chosen, not what was computed."""
    return isinstance(result, torch.Tensor) and not (
        result.is_floating_point() or result.is_complex() or result.dtype == torch.bool
    )
