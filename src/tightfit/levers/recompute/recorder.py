"""Watches a block's forward: decides for each operator's output whether it is held, and notes how to make it again
if not.

Two observers stand around the forward. The dispatch mode sees every operator below autograd and records those whose
output is not kept. The saved-tensor hooks see what autograd wants to hold for backward and hand it a promise
(`Promise`) in the place of each recorded output. The user's Python code is never run a second time, so nothing it
does besides computing (buffers updated, caches appended, hooks, random numbers of other libraries) happens twice.
"""

import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only

from tightfit.activity import now
from tightfit.errors import RecomputeError
from tightfit.levers.recompute.generators import GeneratorState, generator_of
from tightfit.levers.recompute.policy import Decision, OperatorKey, Policy
from tightfit.levers.recompute.replay import materialise
from tightfit.levers.recompute.values import (
    Geometry,
    Operation,
    Product,
    Reference,
    existing_root,
    forget_root,
    modified_in_place,
    product_of,
    root_of,
    set_product,
)
from tightfit.operators import Traits, is_index, traits_of, written_arguments

aten = torch.ops.aten
UNSUPPORTED = frozenset(
    {aten.resize_.default, aten.resize_as_.default, *(getattr(aten.set_, n) for n in aten.set_.overloads())}
)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether geometry over a storage describes the tensor completely."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


class Promise(NamedTuple):
    """What autograd holds in place of a saved tensor: it is computed again when asked for."""

    product: Product
    geometry: Geometry


class Held(NamedTuple):
    """A saved tensor that is held anyway, and its version, which autograd does not check behind hooks."""

    tensor: torch.Tensor
    version: int


def pack(tensor: torch.Tensor) -> Promise | Held:
    """Saved-tensor hook: hold what is held anyway, promise the rest."""
    if now.on_save is not None:
        now.on_save(tensor)
    product = product_of(tensor.untyped_storage()) if has_plain_storage(tensor) else None
    if product is None or product.blank:
        return Held(tensor, tensor._version)
    return Promise(product, Geometry.of(tensor))


def unpack(saved: Promise | Held) -> torch.Tensor:
    """Saved-tensor hook: the tensor itself, computed again if need be."""
    if isinstance(saved, Promise):
        materialise(saved.product)
        with torch.no_grad():
            return saved.geometry.over(saved.product.base())
    if saved.tensor._version != saved.version:
        raise modified_in_place(saved.tensor, saved.version)
    return saved.tensor


class Recorder(TorchDispatchMode):
    """The observer of one call of one block (a region)."""

    def __init__(self, region: str, policy: Policy):
        super().__init__()
        self.region = region
        self.policy = policy
        self.counts: Counter[str] = Counter()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> "Recorder":
        super().__enter__()
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hooks.__exit__(*exception)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        traits = traits_of(func)
        if traits.is_view:
            return func(*args, **kwargs)
        key = OperatorKey(traits.name, self.counts[traits.name])
        self.counts[traits.name] += 1
        outer = now.region, now.occurrence
        now.region, now.occurrence = self.region, key.occurrence
        try:
            return self.run(func, traits, key, args, kwargs)
        finally:
            now.region, now.occurrence = outer

    def run(self, func: Any, traits: Traits, key: OperatorKey, args: tuple, kwargs: dict) -> Any:
        """Run the operator; record it unless its outputs are kept."""
        decision = self.policy.decide(key)
        if decision is Decision.OFFLOAD:
            raise RecomputeError(f"{self.region}: {key.name} is to be offloaded, which no lever of this release does")
        if func in UNSUPPORTED:
            raise RecomputeError(
                f"{self.region}: {key.name} exchanges the memory under a tensor, which cannot be recomputed: "
                "leave this block out"
            )
        targets = [t for t in tree_iter(written_arguments(traits, args, kwargs)) if isinstance(t, torch.Tensor)]
        operation = None
        if decision is Decision.RECOMPUTE and not self.writes_only_held(traits, targets):
            operation = record(func, traits, args, kwargs)
        for target in targets:
            preserve(target)
        results = func(*args, **kwargs)
        if operation is not None and any(is_index(t) for t in tree_iter(results)):
            operation = None  # routing and sorting decisions are always kept
        note_writes(operation, targets)
        if not traits.returns_written:
            note_results(operation, traits, results, targets)
        return results

    @staticmethod
    def writes_only_held(traits: Traits, targets: list[torch.Tensor]) -> bool:
        return traits.returns_written and all(
            not has_plain_storage(t) or product_of(t.untyped_storage()) is None for t in targets
        )


def record(func: Any, traits: Traits, args: tuple, kwargs: dict) -> Operation:
    """Note the call with references in place of tensors, before it runs."""

    def refer(tensor: torch.Tensor) -> Any:
        if not has_plain_storage(tensor):
            return tensor
        product = product_of(tensor.untyped_storage())
        if product is None or (product.blank and not traits.written):
            return Reference(root_of(tensor), Geometry.of(tensor))
        return Reference(product, Geometry.of(tensor))

    state = GeneratorState.of(generator_of(args, kwargs)) if traits.is_random else None
    held_args, held_kwargs = tree_map_only(torch.Tensor, refer, (args, kwargs))
    return Operation(func, held_args, held_kwargs, state)


def preserve(target: torch.Tensor) -> None:
    """The storage of `target` is about to be written: those who hold its content as a root get a copy."""
    if not has_plain_storage(target):
        return
    storage = target.untyped_storage()
    root = existing_root(storage)
    if root is not None:
        root.hold_copy()
        forget_root(storage)


def note_writes(operation: Operation | None, targets: list[torch.Tensor]) -> None:
    """Each written storage that held a product now holds another one, or memory that is kept."""
    plain = [target.untyped_storage() for target in targets if has_plain_storage(target)]
    for index, storage in enumerate(plain):
        if product_of(storage) is None:
            continue  # memory that is not ours to free
        after = None if operation is None else Product(operation)
        set_product(storage, after)
        if operation is not None and after is not None:
            operation.becomes.append((index, weakref.ref(after)))


def note_results(operation: Operation | None, traits: Traits, results: Any, targets: list[torch.Tensor]) -> None:
    """Each fresh storage among the results holds a product of this operation."""
    if operation is None:
        return
    arguments = {id(reference.value) for reference in operation.references}
    arguments |= {id(after()) for _, after in operation.becomes}
    for position, result in enumerate(tree_flatten(results)[0]):
        if not isinstance(result, torch.Tensor) or not has_plain_storage(result):
            continue
        storage = result.untyped_storage()
        product, root = product_of(storage), existing_root(storage)
        if {id(product), id(root)} & arguments or any(t.untyped_storage()._cdata == storage._cdata for t in targets):
            continue  # an argument came back
        if product is None:
            product = Product(operation, blank=traits.is_uninitialised)
            set_product(storage, product)
        operation.outputs.append((position, weakref.ref(product)))


def hold(outputs: Any) -> None:
    """The block is left: what it returns is memory that the caller holds."""
    for tensor in tree_iter(outputs):
        if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor):
            storage = tensor.untyped_storage()
            product = product_of(storage)
            if product is not None:
                set_product(storage, None)
                product.fill(tensor)
