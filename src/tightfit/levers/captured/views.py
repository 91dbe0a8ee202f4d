"""Makes fewer views: equal ones are one, and one view replaces a chain of them.

A graph without writes in place has every view again at each place where it is read.
"""

from typing import Any

import torch

from tightfit.levers.captured.partition import base_of, is_view

aten = torch.ops.aten

# Operators whose results are contiguous whatever their arguments, so that a place in one is known without its strides.
CONTIGUOUS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


def join_views(graph: Any, returned: set[Any]) -> None:
    """Replace each view by an earlier one of the same elements. Those that are `returned` stay as they are."""
    places: dict[Any, Any] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        place = (base_of(node), *geometry_of(value))
        first = places.setdefault(place, node)
        if first is not node and is_view(node) and node not in returned:
            node.replace_all_uses_with(first)
    drop_unread_views(graph)


def shorten_views(graph: Any, returned: set[Any]) -> None:
    """Replace chains of views of a product by one view."""
    for node in list(graph.nodes):
        if not is_view(node) or node in returned or not isinstance(node.args[0], torch.fx.Node):
            continue
        base, value = base_of(node), node.meta.get("val")
        if node.args[0] is base or base.target not in CONTIGUOUS or not isinstance(value, torch.Tensor):
            continue
        if value.is_conj() or value.is_neg() or value.dtype != base.meta["val"].dtype:
            continue
        size, stride, offset, *_ = geometry_of(value)
        with graph.inserting_before(node):
            short = graph.call_function(aten.as_strided.default, (base, list(size), list(stride), offset))
        short.meta.update(node.meta)
        node.replace_all_uses_with(short)
    drop_unread_views(graph)


def drop_unread_views(graph: Any) -> None:
    for node in reversed(graph.nodes):
        if not node.users and (is_view(node) or node.target is aten.split.Tensor):
            graph.erase_node(node)


def geometry_of(value: torch.Tensor) -> tuple:
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()
