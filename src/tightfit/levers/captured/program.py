"""Turns a graph of ATen operators into one straight Python function.

The function takes one list of arguments and empties it. Each value is freed after the last operator that reads it, and
an operator writes into its argument's memory where nothing else reads that memory again, as autograd does for sums of
gradients. In backward a value that is computed again is computed right before its first reader.
"""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tightfit.levers.activity import captured_program, recomputation, simulators
from tightfit.levers.captured.draws import replayed
from tightfit.levers.captured.in_place import Memory
from tightfit.levers.captured.partition import (
    FORWARD,
    base_of,
    demand_plain,
    drop_unread,
)
from tightfit.levers.captured.views import CONTIGUOUS, join_views, shorten_views
from tightfit.runtime.bindings import binding_of
from tightfit.runtime.internals import boxed, dispatch_is_watched, function_switches, switched_as


class Forward(threading.local):
    """The process's settings in the forward whose operators this thread computes again, if they differ from now."""

    switches: tuple | None = None


_forward = Forward()


@contextmanager
def as_in_forward(switches: tuple) -> Iterator[None]:
    """A context in which programs compute operators again under these settings."""
    _forward.switches = None if switches == function_switches() else switches
    try:
        yield
    finally:
        _forward.switches = None


@contextmanager
def recomputed() -> Iterator[None]:
    """A context of a program whose operators are computed again."""
    with recomputation(), nullcontext() if _forward.switches is None else switched_as(_forward.switches):
        yield


def write_forward(module: Any, *, returns: int | None = None) -> Callable[[list[Any]], Any]:
    """The program of a graph of forward, whose first results (`returns` of them, or all) go to the block's caller."""
    if not any(FORWARD in node.meta for node in module.graph.nodes):
        demand_plain(module)  # a block without gradients, whose graph was not divided
    (output,) = module.graph.find_nodes(op="output")
    returned = {node for node in output.args[0][:returns] if isinstance(node, torch.fx.Node)}
    join_views(module.graph, returned)
    shorten_views(module.graph, returned)
    return written(module, list(module.graph.nodes), set(), returned)


def write_backward(module: Any, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """The program of a graph of backward."""
    drop_unread(module.graph)
    join_views(module.graph, set())
    shorten_views(module.graph, set())
    again = {node for node in module.graph.nodes if FORWARD in node.meta and node.op == "call_function"}
    return written(module, on_demand(module.graph, again), again, set())


def on_demand(graph: Any, again: set[Any]) -> list[Any]:
    """The nodes in another order: those that are computed `again` come right before their first reader."""
    order: dict[Any, None] = {}
    places = {node: place for place, node in enumerate(graph.nodes)}
    draws: dict[Any, list[Any]] = {}  # by player
    for node in graph.nodes:
        if node.target is replayed:
            draws.setdefault(node.args[0], []).append(node)

    def earlier(node: Any) -> Iterator[Any]:
        yield from node.all_input_nodes
        if node.target is replayed:  # a player repeats its draws in the order of forward
            own = draws[node.args[0]]
            yield from own[: own.index(node)]

    for node in graph.nodes:
        if node in again:
            continue
        missing: set[Any] = set()
        waiting = [node]
        while waiting:
            for source in earlier(waiting.pop()):
                if source in again and source not in order and source not in missing:
                    missing.add(source)
                    waiting.append(source)
        order.update(dict.fromkeys(sorted(missing, key=places.__getitem__)))
        order[node] = None
    return list(order)


def has_known_strides(base: Any) -> bool:
    """True if a storage has the layout that was recorded. Some kernels return another one than PyTorch foresees."""
    if base.op != "call_function":
        return True  # dynamo compares the strides of arguments
    target = base.target
    return target in CONTIGUOUS or torch.Tag.pointwise in getattr(target, "tags", ())


def as_laid_out_outside(order: Sequence[Any]) -> set[Any]:
    """The nodes whose strides may be those of a gradient from outside, which nobody compares with the recorded ones."""
    found: set[Any] = set()
    for node in order:
        is_gradient = node.op == "placeholder" and "tangents" in str(node.target)
        if is_gradient or (node.target not in CONTIGUOUS and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def written(module: Any, order: list[Any], again: set[Any], returned: set[Any]) -> Callable[[list[Any]], Any]:
    """The function of a graph whose nodes run in this order."""
    writer = Writer(module, order, again, returned)
    straight, watched = writer.function(marked=False), writer.function(marked=True) if again else None

    def call(args: list[Any]) -> Any:
        if simulators.captured is not None:
            with captured_program():
                return simulators.captured.run(watched or straight, args)
        is_marked = watched is not None and (dispatch_is_watched() or _forward.switches is not None)
        return (watched if watched is not None and is_marked else straight)(args)

    return boxed(call)


class Writer:
    """Writes the lines of one program."""

    def __init__(self, module: Any, order: list[Any], again: set[Any], returned: set[Any]):
        self.module = module
        self.returned = returned
        self.again = again
        self.order = order
        self.names = {node: f"t{place}" for place, node in enumerate(order)}
        self.scope: dict[str, Any] = {"recomputed": recomputed}
        self.calls: dict[int, str] = {}
        self.memory = Memory(order)
        self.loose = as_laid_out_outside(order)
        last: dict[Any, Any] = {}
        for node in order:
            for source in node.all_input_nodes:
                last[source] = node
        self.freed: dict[Any, list[Any]] = {}
        for source, reader in last.items():
            self.freed.setdefault(reader, []).append(source)
        self.lines = list(self.write())

    def write(self) -> Iterator[tuple[bool, str]]:
        """The lines, each with whether it computes something again."""
        inputs = [self.names[node] for node in self.order if node.op == "placeholder"]
        if inputs:
            yield False, f"{', '.join(inputs)}, = args"
        yield False, "args.clear()"
        for node in self.order:
            if node.op == "placeholder":
                if not node.users:
                    yield False, f"del {self.names[node]}"
                continue
            if node.op == "output":
                yield False, f"return {self.text(tuple(node.args[0]))}"
                continue
            is_again = node in self.again
            yield is_again, f"{self.names[node]} = {self.expression(node)}"
            dead = [self.names[source] for source in self.freed.get(node, ())]
            if not node.users:
                dead.append(self.names[node])
            if dead:
                yield is_again, f"del {', '.join(dead)}"

    def expression(self, node: Any) -> str:
        if node.op == "get_attr":
            return self.constant(getattr(self.module, node.target))
        if node.target is operator.getitem:
            source, place = node.args
            return f"{self.names[source]}[{place!r}]"
        target, args = node.target, node.args
        if target is replayed:
            player, drawn, *args = args
            drawn = self.memory.in_place(node) or drawn
            function = self.constant(target)
            return f"{function}({self.names[player]}, {self.constant(drawn)}, {self.arguments(args, node.kwargs)})"
        if isinstance(target, torch._ops.OpOverload):
            if node not in self.returned:  # in place it may be a view, which autograd would not let the caller write
                target = self.memory.in_place(node) or target
            if target is torch.ops.aten._unsafe_view.default and node not in self.returned:
                target = torch.ops.aten.view.default  # they differ in what autograd knows of a result
            base = base_of(node)
            if target is torch.ops.aten.view.default and (base in self.loose or not has_known_strides(base)):
                return f"{self.constant(torch.reshape)}({self.arguments(args, node.kwargs)})"
            target = binding_of(target, node)
        return f"{self.constant(target)}({self.arguments(args, node.kwargs)})"

    def arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self.text, args), *(f"{name}={self.text(value)}" for name, value in kwargs.items())])

    def text(self, value: Any) -> str:
        """A value as Python source."""
        if isinstance(value, torch.fx.Node):
            return self.names[value]
        if isinstance(value, list | tuple):
            if not any(isinstance(item, torch.fx.Node) for item in value) and value:
                return self.constant(tuple(value))
            inner = "".join(f"{self.text(item)}, " for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.constant(value)

    def constant(self, value: Any) -> str:
        name = self.calls.get(id(value))
        if name is None:
            name = self.calls[id(value)] = f"c{len(self.calls)}"
            self.scope[name] = value
        return name

    def function(self, *, marked: bool) -> Callable[[list[Any]], Any]:
        """The program. With `marked` its recomputations are known to observers of operators."""
        text = ["def program(args):"]
        inside = False
        for is_again, line in self.lines:
            if marked and is_again and not inside:
                text.append("    with recomputed():")
            inside = marked and is_again
            text.append(f"{'        ' if inside else '    '}{line}")
        scope = dict(self.scope)
        exec(compile("\n".join(text), "<captured block>", "exec"), scope)
        return scope["program"]
