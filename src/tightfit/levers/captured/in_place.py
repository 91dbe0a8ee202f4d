"""Finds operators of a graph that can write their result into the memory of their first argument."""

import operator
from typing import Any

import torch

from tightfit.levers.captured.draws import replayed
from tightfit.levers.captured.partition import base_of, is_view
from tightfit.runtime.operators import traits_of

aten = torch.ops.aten
_BERNOULLI = {aten.bernoulli.p: aten.bernoulli_.float}  # the functional form of `torch.empty_like(x).bernoulli_(p)`


class Memory:
    """Which storage each node of a graph uses, and until when. The nodes run in the given order."""

    def __init__(self, order: list[Any]):
        self.places = {node: place for place, node in enumerate(order)}
        self.bases = {node: base_of(node) for node in order}
        self.last: dict[Any, int] = {}  # by storage: the place of its last reader
        self.pinned: set[Any] = set()  # storages that others may hold
        self.merged: dict[Any, Any] = {}  # storages that are the memory of another one
        for node in order:
            for source in node.all_input_nodes:
                base = self.bases[source]
                self.last[base] = self.places[node]
                if node.op == "output" or is_opaque(node):
                    self.pinned.add(base)
            if node.op != "call_function" or is_opaque(node):
                self.pinned.add(self.bases[node])
            if node.target is operator.getitem and not is_view(node) and is_opaque(node.args[0]):
                self.pinned.add(node)

    def base(self, node: Any) -> Any:
        base = self.bases[node]
        while base in self.merged:
            base = self.merged[base]
        return base

    def in_place(self, node: Any) -> Any:
        """The operator that does the same in the memory of the first argument, if nothing else needs that memory."""
        called, args = call_of(node)
        changed = in_place_form(called)
        if changed is None or not args or not isinstance(args[0], torch.fx.Node) or rounds_otherwise(called, node):
            return None
        if called in _BERNOULLI:
            # Whatever the layout: the draws fill memory in its order.
            is_fresh = traits_of(args[0].target).is_uninitialised if is_operator(args[0]) else False
            return changed if is_fresh and set(args[0].users) == {node} else None
        target, others = args[0], [source for source in node.all_input_nodes if source is not args[0]]
        base = self.base(target)
        if base in self.pinned or self.last[base] > self.places[node]:
            return None
        if any(self.base(other) is base for other in others):
            return None
        if not (same_memory(target, node) and fills(target, base)):
            return None
        self.merged[self.bases[node]] = base
        self.last[base] = self.last.get(self.bases[node], self.places[node])
        if self.bases[node] in self.pinned:
            self.pinned.add(base)
        return changed


def call_of(node: Any) -> tuple[Any, tuple]:
    """The operator that a node calls, and its arguments."""
    return (node.args[1], node.args[2:]) if node.target is replayed else (node.target, node.args)


def is_opaque(node: Any) -> bool:
    """True if a node may return memory of its arguments although its schema does not say so."""
    called, _ = call_of(node)
    if node.op != "call_function" or called is operator.getitem:
        return False
    return not isinstance(called, torch._ops.OpOverload) or traits_of(called).is_foreign


def is_operator(node: Any) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def in_place_form(target: Any) -> Any:
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    if target in _BERNOULLI:
        return _BERNOULLI[target]
    if torch.Tag.pointwise not in target.tags or traits_of(target).written or traits_of(target).is_random:
        return None
    packet = getattr(aten, f"{target._opname}_", None)
    changed = getattr(packet, target._overloadname, None)
    if not isinstance(changed, torch._ops.OpOverload):
        return None
    same = [a.name for a in changed._schema.arguments] == [a.name for a in target._schema.arguments]
    return changed if same else None


def rounds_otherwise(called: Any, node: Any) -> bool:
    """True if an operator's form in place may round otherwise on a CPU (`test_captured_numbers.py` compares all)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if value.is_complex():
        # A product is several roundings. The compiler fuses them in another way where a loop writes into what it reads.
        return called not in (aten.add.Tensor, aten.sub.Tensor)
    # The number is rounded to 16 bits first in place, and not out of place.
    return called is aten.mul.Scalar and value.is_floating_point() and value.itemsize == 2


def same_memory(one: Any, other: Any) -> bool:
    """True if two nodes have the same shape, strides and dtype."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    plain = not (a.is_conj() or a.is_neg() or b.is_conj() or b.is_neg())
    return plain and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def fills(node: Any, base: Any) -> bool:
    """True if a node has all of its storage: a result in a part of it would hold the rest."""
    value, whole = node.meta.get("val"), base.meta.get("val")
    if not isinstance(whole, torch.Tensor):
        return False
    return value.numel() * value.itemsize == whole.numel() * whole.itemsize
