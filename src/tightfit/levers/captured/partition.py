"""Divides a joint graph of forward and backward: which values of a block are held between the two.

The graph is functional: nothing writes in place but the last nodes of forward, which update buffers. A view is held if
the value under it is. A value that is not held is computed again in backward, from those that are.
"""

import operator
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from tightfit.errors import CompileError
from tightfit.levers.captured.draws import STATE_BYTES, replayed, resumed, state_of_generator
from tightfit.levers.recompute.policy import Decision, OperatorKey, Policy, operands_of
from tightfit.runtime.internals import (
    divide_joint_graph,
    inputs_written_later,
    is_of_backward,
    recorded_value,
    results_with_gradients,
    sizes_are_static,
)
from tightfit.runtime.operators import chooses, traits_of

aten = torch.ops.aten

# Parts of a tensor that are no views for autograd. Eager code that writes into one computes where it lies, between
# other parts (the gates of `nn.GRUCell`); a graph without writes has a tensor of its own there, over which sigmoid and
# sums round otherwise.
UNSAFE = frozenset({aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default})
FORWARD = "tightfit_forward"  # the mark of forward's nodes, which their copies in the graph of backward keep


def divide(policy: Policy, joint: Any, *, num_fwd_outputs: int, fused: bool = False, **options: Any) -> tuple[Any, Any]:
    """Make the graphs of forward and backward. Raises `CompileError` for a graph that cannot be captured.

    `fused`: for PyTorch's compiler. What random operators drew is held then, whatever the policy says.
    """
    demand_plain(joint)
    mark_forward(joint)
    demand_separate(joint)
    found = Values(joint, policy, fused=fused)
    saved = found.held_for_backward()
    forward, backward = divide_joint_graph(joint, saved, num_fwd_outputs, options)
    save_generators(forward, backward)
    return forward, backward


def mark_forward(joint: Any) -> None:
    for node in joint.graph.nodes:
        if node.op == "call_function" and not is_of_backward(node):
            node.meta[FORWARD] = True


def demand_separate(joint: Any) -> None:
    """Raise `CompileError` if the block writes into its input, whose gradients eager code adds up in another order."""
    if any(is_written for _, is_written in results_with_gradients(joint)):
        raise CompileError("it writes in place into a tensor that has gradients")


def demand_plain(graph: Any) -> None:
    """Raise `CompileError` unless a graph consists of operators on tensors of fixed sizes."""
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function", "get_attr", "output"):
            raise CompileError(f"it contains {node.op} {node.target}")
        is_call = node.op == "call_function" and node.target is not operator.getitem
        if is_call and not isinstance(node.target, torch._ops.OpOverload):
            raise CompileError(f"it contains {node.target}, which is no single operator")
        if is_call and node.target in UNSAFE:
            raise CompileError(f"what {node.target} returns may be written in place, which rounds by its layout")
        if is_call and is_random(node) and not node.users:
            raise CompileError(f"nothing reads what {node.target} draws")  # and so the graph would not draw it
        if is_call and makes_sparse(node):
            raise CompileError(f"{node.target} makes a sparse gradient")
        if not sizes_are_static(node.meta.get("val")):
            raise CompileError(f"sizes or numbers in it depend on the data ({node.name})")


def single_gradients(backward: Any, sums: Container[str], reads: Sequence[int]) -> tuple[int, ...]:
    """Let backward return each gradient of an input that autograd adds up, in its order: the first in the place of the
    sum, the others behind all.

    `sums` names the nodes that autograd adds, `reads` says how many gradients each input with any has. Returns the
    places of the inputs with others. Raises `CompileError` where the sum is not autograd's.
    """
    (output,) = backward.graph.find_nodes(op="output")
    gradients = list(output.args[0])
    with_any = [place for place, gradient in enumerate(gradients) if gradient is not None]
    counts = [count for count in reads if count]
    if len(with_any) != len(counts):
        raise CompileError("it reads an input whose gradient is not defined")
    others, again = [], []
    for place, count in zip(with_any, counts, strict=True):
        last: list[Any] = []
        for _ in range(count - 1):
            node = gradients[place]
            if not (
                isinstance(node, torch.fx.Node) and node.name in sums and len(node.users) == 1 and len(node.args) == 2
            ):
                raise CompileError("it reads a tensor that needs a gradient more than once, and adds up what it gets")
            gradients[place], added = node.args
            output.args = (tuple(gradients),)
            backward.graph.erase_node(node)
            last.insert(0, added)
        others += last
        again += [place] * len(last)
    output.args = ((*gradients, *others),)
    return tuple(again)


def sources_of_gradients(backward: Any) -> tuple[frozenset[int] | None, ...]:
    """For each gradient that backward returns, the numbers of the tangents that it depends on; None for no gradient."""
    depends = _tangents_below(backward)
    (output,) = backward.graph.find_nodes(op="output")
    return tuple(depends[each] if isinstance(each, torch.fx.Node) else None for each in output.args[0])


def drop_tangents(backward: Any, missing: Set[int], sums: Container[str]) -> None:
    """Take what depends on `missing` tangents alone out of the sums of autograd, which does not add what is undefined.

    Sums with zeros would have another layout, and sums over that another order.
    """
    depends = _tangents_below(backward)
    changed: set[Any] = set()  # what has other strides than a sum in whose place it is
    for node in list(backward.graph.nodes):
        if node.name not in sums:
            continue
        one, other = node.args
        for each, kept in ((one, other), (other, one)):
            if depends[each] and depends[each] <= missing:
                changed.update(node.users)
                node.replace_all_uses_with(kept)
                break
    drop_unread(backward.graph)
    _lay_out_again(backward.graph, changed)


def _lay_out_again(graph: Any, changed: set[Any]) -> None:
    """Record the strides of these nodes, and of those that follow from them, again: whether a reshape copies too."""
    for node in list(graph.nodes):
        if node in changed and node.op == "call_function":
            changed.update(node.users)
            node.replace_all_uses_with(_reshaped(graph, node))
    drop_unread(graph)


def _reshaped(graph: Any, node: Any) -> Any:
    """The node that computes what a node did, with the strides that it has now."""
    before, size = node.args[0], node.args[1] if len(node.args) > 1 else None
    if node.target is aten._unsafe_view.default and before.target is aten.clone.default:
        viewed = _inserted(graph, node, aten.view.default, (before.args[0], size))
        if viewed is not None:
            return viewed
    if node.target is aten.view.default:
        viewed = _inserted(graph, node, aten.view.default, (before, size))
        if viewed is not None:
            return viewed
        copied = _inserted(graph, node, aten.clone.default, (before,), {"memory_format": torch.contiguous_format})
        return _inserted(graph, node, aten._unsafe_view.default, (copied, size))
    copies = node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format
    if copies and before.meta["val"].is_contiguous():
        return before
    return _inserted(graph, node, node.target, node.args, node.kwargs)


def _inserted(graph: Any, place: Any, target: Any, args: tuple, kwargs: Mapping[str, Any] | None = None) -> Any:
    """A node before another one, with the value that it makes of its arguments'; None if it is no view of them."""
    given: Any = torch.fx.map_arg((args, dict(kwargs or {})), lambda each: each.meta["val"])
    value = recorded_value(target, *given)
    if value is None:
        return None
    with graph.inserting_before(place):
        made = graph.call_function(target, args, dict(kwargs or {}))
    made.meta.update(place.meta)
    made.meta["val"] = value
    return made


def _tangents_below(backward: Any) -> dict[Any, frozenset[int]]:
    """For each node of backward, the numbers of the tangents that it depends on."""
    depends: dict[Any, frozenset[int]] = {}
    tangents = 0
    for node in backward.graph.nodes:
        depends[node] = frozenset().union(*(depends[source] for source in node.all_input_nodes))
        if node.op == "placeholder" and "tangents" in str(node.target):
            depends[node], tangents = frozenset((tangents,)), tangents + 1
    return depends


class Values:
    """The values of a joint graph, and the policy's decision about each."""

    def __init__(self, joint: Any, policy: Policy, *, fused: bool = False):
        self.joint = joint
        self.policy = policy
        self.fused = fused
        self.keys: dict[Any, OperatorKey] = {}
        self.written = set(inputs_written_later(joint))
        backward = [node for node in joint.graph.nodes if node.op == "call_function" and FORWARD not in node.meta]
        self.read = {base_of(source) for node in backward for source in node.all_input_nodes}
        self.returned = {base_of(node) for node, _ in results_with_gradients(joint)}
        counts: dict[tuple[str, str], int] = {}
        by_operands = policy.counts_by_operands
        for node in joint.graph.nodes:
            if FORWARD not in node.meta or node.target is operator.getitem or traits_of(node.target).is_view:
                continue
            call = str(node.target), operands_of(operands_in(node)) if by_operands else ""
            self.keys[node] = OperatorKey(call[0], counts.get(call, 0), call[1])
            counts[call] = counts.get(call, 0) + 1

    def held_for_backward(self) -> list[Any]:
        """The nodes of forward, inputs among them, that backward reads, in the order of the graph."""
        (output,) = self.joint.graph.find_nodes(op="output")
        returned, *_ = output.args
        waiting = [node for node in returned if isinstance(node, torch.fx.Node) and not is_forward(node)]
        seen, held = set(waiting), set()
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source in seen:
                    continue
                seen.add(source)
                if is_forward(source) and self.is_held(source):
                    held.add(source)
                elif source.op != "placeholder":
                    waiting.append(source)
        if held & self.written:
            raise CompileError("backward reads an input that the block writes in place")
        return [node for node in self.joint.graph.nodes if node in held]

    def is_held(self, node: Any) -> bool:
        """True if a node of forward that backward needs is held, and not computed again."""
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            return False  # a constant of the graph
        base = base_of(node)
        if base is not node:
            if self.fused and is_expanded(node):
                return False  # the compiler would write out, for a card, what an expanded view repeats
            # A view of an input is made again, since that takes no memory either way.
            return base.op == "call_function" and self.is_held(base)
        if node.target is operator.getitem:
            return self.is_held(node.args[0])
        if any(base_of(source) in self.written for source in node.all_input_nodes):
            return True  # by the time of backward the block has written into its argument
        traits = traits_of(node.target)
        if traits.is_foreign or traits.written:
            return True  # nobody knows whether such an operator gives the same result again
        if self.fused and is_random(node):
            return True
        if chooses(traits, values_of(node)):
            return True  # a recomputed router may choose other experts than forward did
        if node in self.returned and node not in self.read:
            return False  # eager code does not hold it, so the block's caller may write into it
        return self.policy.decide(self.keys[node]) is Decision.KEEP


def demand_single_casts(weights: Iterable[Any]) -> None:
    """Raise `CompileError` if autocast casts a weight at several places.

    Eager code casts it once, and adds the gradients of all places in 16 bits.
    """
    for node in weights:
        if sum(not is_of_backward(user) and user.target is torch.ops.aten._to_copy.default for user in node.users) > 1:
            raise CompileError("autocast casts one of their weights at several places")


def makes_sparse(node: Any) -> bool:
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("sparse") is True


def is_forward(node: Any) -> bool:
    is_input = node.op == "placeholder" and "tangents" not in str(node.target)
    return is_input or node.op == "get_attr" or FORWARD in node.meta


def is_view(node: Any) -> bool:
    """True if a node's result shares the storage of its first argument."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and traits_of(node.target).is_view


def base_of(node: Any) -> Any:
    """The node whose storage a node shares; itself if it is no view."""
    while is_view(node):
        node = node.args[0]
    return node


def operands_in(node: Any) -> list[Any]:
    """The arguments of a node's operator, with the tensors that stand for the nodes among them."""

    def operand(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return item.meta.get("val")
        return [operand(part) for part in item] if isinstance(item, list | tuple) else item

    return [operand(item) for item in (*node.args, *node.kwargs.values())]


def values_of(node: Any) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, list | tuple) else (value,)


def is_expanded(node: Any) -> bool:
    """True if several places of a tensor are one in memory."""
    return any(isinstance(value, torch.Tensor) and 0 in value.stride() for value in values_of(node))


def is_random(node: Any) -> bool:
    """True if a node draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload) or not traits_of(node.target).is_random:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("dropout_p", 0) != 0  # attention draws only for dropout


def save_generators(forward: Any, backward: Any) -> None:
    """Let backward repeat the draws of the random operators that it computes again.

    Forward saves the generator's state before the first of several draws that follow each other, and backward repeats
    them in that order. PyTorch's partitioners leave draws in backward that nobody reads, which are removed.
    """
    drop_unread(backward.graph)
    repeated = {node.name: node for node in backward.graph.nodes if is_random(node)}
    if not repeated:
        return
    states: list[Any] = []
    tangent = next(n for n in backward.graph.find_nodes(op="placeholder") if "tangents" in str(n.target))
    player: Any = None  # the node in backward that continues the draws of the run so far
    for drawn in [node for node in forward.graph.nodes if is_random(node)]:
        again = repeated.get(drawn.name)
        if again is None:
            player = None
            continue
        if player is None:
            with forward.graph.inserting_before(drawn):
                state = forward.graph.call_function(state_of_generator, (device_of(drawn),))
            with backward.graph.inserting_before(tangent):
                place = backward.graph.placeholder(f"state_of_generator_{len(states)}")
            with backward.graph.inserting_before(again):
                player = backward.graph.call_function(resumed, (place,))
            for node in (state, place):
                node.meta["val"] = torch.empty(STATE_BYTES, dtype=torch.uint8, device="meta")
            player.meta[FORWARD] = True
            states.append(state)
        with backward.graph.inserting_before(again):
            repeat = backward.graph.call_function(replayed, (player, again.target, *again.args), dict(again.kwargs))
        repeat.meta.update(again.meta)
        again.replace_all_uses_with(repeat)
        backward.graph.erase_node(again)
    (output,) = forward.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *states),)
    forward.recompile()
    backward.recompile()


def device_of(node: Any) -> torch.device:
    """The device whose generator a random operator draws from: that of its result."""
    return next(value.device for value in values_of(node) if isinstance(value, torch.Tensor))


def drop_unread(graph: Any) -> None:
    """Remove the nodes whose results nobody reads."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
