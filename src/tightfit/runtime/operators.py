"""Facts about ATen operators from their schemas, looked up once for each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.runtime.internals import has_kernel

aten = torch.ops.aten

# The results share their input's storage, although the schema does not say so.
_SILENT_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.lift_fresh.default, aten.unsafe_split.Tensor, aten.unsafe_chunk.default,
     aten.unsafe_split_with_sizes.default}
)  # fmt: skip

# These write into arguments that their schema does not mark as written (running statistics of batch norm).
_HIDDEN_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})

# These overwrite their whole target, and never read it.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "log_normal_"}
    | {"geometric_", "cauchy_"}
)

# These replace the memory of a tensor, not its content.
EXCHANGES_MEMORY = frozenset(
    {aten.resize_.default, aten.resize_as_.default, *(getattr(aten.set_, name) for name in aten.set_.overloads())}
)

# Random draws into a fresh buffer whose schema carries no `nondeterministic_seeded` tag in every release.
_RANDOM_WITHOUT_TAG = frozenset(
    {"aten::rrelu_with_noise", "aten::rrelu_with_noise_", "aten::rrelu_with_noise_functional"}
)

# Operators of another library whose results depend only on their arguments: products with frozen 4-bit weights, and
# these weights at full width (bitsandbytes/backends). Of ours, products of experts in few bits, and what ranks of
# context parallel gather.
_REPEATABLE = frozenset(
    {"bitsandbytes::gemm_4bit", "bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise"}
    | {"tightfit::experts_product", "tightfit::experts_gradient"}
    | {"tightfit::gather_parts"}  # all ranks recompute the same operators in one order
)


# `_chunk_cat` is called below autograd by FSDP2. `allclose` asks for a number within its kernel, and packing sequences
# reads their lengths there. `_trilinear` is a loop of products. Kernels of FSDP2, of functional collectives and of
# `torch.nn` are written in Python.
_COMPOSED = frozenset({"aten::_chunk_cat", "aten::allclose", "aten::_pack_padded_sequence", "aten::_trilinear"})
_COMPOSED_NAMESPACES = frozenset({"fsdp", "_c10d_functional", "torch_nn"})


@dataclass(frozen=True, slots=True)
class Traits:
    """Facts about one operator overload."""

    name: str  # "aten.mm.default"
    is_view: bool  # every result shares the storage of an argument, and no element is read or written
    written: tuple[tuple[int, str], ...]  # position and name of the arguments that it writes into
    returns_written: bool  # every result is one of the written arguments
    is_random: bool  # draws from a generator
    dropout: tuple[int, str] | None  # position and name of the probability with which attention drops
    is_uninitialised: bool  # returns uninitialised memory
    overwrites: bool  # overwrites its whole target without reading it
    is_foreign: bool  # from another library, so a second call may give another result
    is_collective: bool  # of torch.distributed: sends to other processes, and receives from them
    is_mark: bool  # names a stretch of time for a profiler
    is_composed: bool  # its own kernel on the CPU calls operators, which allocate
    convolves: bool  # a convolution or a recurrent layer
    is_composite: bool  # on devices without a kernel of its own it calls operators, and a mode usually sees those
    exchanges_memory: bool  # replaces the memory of a tensor, not its content
    seeds: frozenset[int]  # integer results that follow from the generator's state and the arguments' shapes


_CONVOLVING = ("conv", "rnn", "lstm", "gru")

# Results of attention on a card. A replay from the same state of the generator gives the same ones.
_SEEDS = frozenset({"rng_state", "philox_seed", "philox_offset", "unused", "cum_seq_q", "cum_seq_k"})

# By identity: PyTorch hashes an operator in Python, which takes longer than the rest of a look-up. The operator stands
# beside its traits, so that no other one gets its identity.
_known: dict[int, tuple[Traits, Any]] = {}


def traits_of(operator: Any) -> Traits:
    """The traits of an `OpOverload`."""
    known = _known.get(id(operator))
    if known is None:
        known = _known[id(operator)] = _inspect(operator), operator
    return known[0]


def _inspect(operator: Any) -> Traits:
    schema = operator._schema
    hidden = _HIDDEN_WRITES.get(schema.name, ())
    if operator.namespace == "c10d" and operator._opname.endswith("_"):
        hidden = (schema.arguments[0].name,)  # collectives write into their first argument, and no schema says so
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden
    )
    aliased = [result.alias_info is not None for result in schema.returns]
    reshapes = torch.Tag.inplace_view in operator.tags and operator not in EXCHANGES_MEMORY
    return Traits(
        name=str(operator),
        is_view=operator in _SILENT_VIEWS or reshapes or (not written and bool(aliased) and any(aliased)),
        written=written,
        returns_written=bool(written) and all(aliased),
        dropout=next(((i, a.name) for i, a in enumerate(schema.arguments) if a.name == "dropout_p"), None),
        is_random=torch.Tag.nondeterministic_seeded in operator.tags or schema.name in _RANDOM_WITHOUT_TAG,
        is_uninitialised=operator.namespace == "aten" and operator._opname in _UNINITIALISED,
        overwrites=operator.namespace == "aten" and operator._opname in _OVERWRITING,
        is_foreign=operator.namespace not in ("aten", "prims") and schema.name not in _REPEATABLE,
        is_collective=operator.namespace == "c10d",
        is_mark=operator.namespace == "profiler",
        is_composed=operator.namespace in _COMPOSED_NAMESPACES or schema.name in _COMPOSED,
        convolves=any(word in operator._opname for word in _CONVOLVING),
        is_composite=has_kernel(operator.name(), "CompositeImplicitAutograd"),
        exchanges_memory=operator in EXCHANGES_MEMORY,
        seeds=frozenset(i for i, result in enumerate(schema.returns) if result.name in _SEEDS),
    )


def written_arguments(traits: Traits, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments of a call that the operator writes into (tensors or lists of tensors)."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in traits.written]


def chooses(traits: Traits, results: Any) -> bool:
    """True if a result is a choice that a second call may make otherwise, such as the indices of `topk` or `sort`."""
    if isinstance(results, torch.Tensor):
        return _is_index(results)
    return any(_is_index(result) for place, result in enumerate(flat(results)) if place not in traits.seeds)


def _is_index(result: Any) -> bool:
    """True if a result is a tensor of integers."""
    return isinstance(result, torch.Tensor) and not (
        result.is_floating_point() or result.is_complex() or result.dtype == torch.bool
    )


def map_instances(kind: type, change: Callable[[Any], Any], items: Iterable[Any]) -> tuple:
    """An operator's arguments with `change` applied to each instance of `kind`, in lists too.

    Arguments of operators are not nested deeper, so this takes a tenth of the time of PyTorch's tree functions.
    """
    # From a list: a generator takes half as long again, and this runs for each recorded operator.
    return tuple(
        [
            change(item)
            if isinstance(item, kind)
            else type(item)(map_instances(kind, change, item))
            if type(item) is list or type(item) is tuple
            else item
            for item in items
        ]
    )


def instances(kind: type, items: Iterable[Any]) -> Iterator[Any]:
    """The instances of `kind` among an operator's arguments or results, in order, in lists too.

    PyTorch's tree functions take three times as long.
    """
    for item in items:
        if isinstance(item, kind):
            yield item
        elif isinstance(item, list | tuple):
            yield from instances(kind, item)


def tensors_among(items: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, in order, in lists too."""
    # A list and no generator: this runs several times for each operator of a dry run.
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += tensors_among(item)
    return found


def flat(results: Any) -> list[Any]:
    """An operator's results as one flat list."""
    if type(results) is not tuple and type(results) is not list:
        return [results]
    return [leaf for result in results for leaf in flat(result)]


def fresh_memory(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of `nbytes` bytes: elements of the dtype if they fill it, else bytes."""
    dtype = torch.uint8 if nbytes % dtype.itemsize else dtype
    return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
