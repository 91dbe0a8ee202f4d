"""Makes captured graphs: the functions that stand for a block's forward from then on, one for each policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.errors import CompileError
from tightfit.levers.captured.partition import base_of, demand_single_casts, divide, is_view
from tightfit.levers.captured.program import write_backward, write_forward
from tightfit.levers.captured.straight import Parts, Program, straight
from tightfit.levers.captured.views import join_views
from tightfit.levers.recompute.policy import Policy
from tightfit.runtime.internals import autocast_is_active, copied_graph, recorded_call, recording_backend


class CapturedGraph:
    """A graph of dynamo, captured under the policies of the blocks that run it. A backend of `torch.compile` makes it.

    AOTAutograd records the joint graph of forward and backward once. Each further policy divides a copy of it, which
    takes a quarter of the time. That needs the graph to run as one node of ours; others serve one policy only.
    """

    def __init__(self, policy: Policy, graph: Any, inputs: Sequence[Any]):
        """Raises `CompileError` for a graph that cannot be captured."""
        demand_no_settings(graph)
        self.under_autocast = autocast_is_active()
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        weights = [place for place, name in enumerate(names) if "_parameters_" in name]
        self.cast = weights if self.under_autocast else []
        parts = Assembly(policy, self.cast)
        general = recording_backend(parts.divide, parts.write_forward, write_backward)(graph, inputs)
        self.count = len(inputs)
        self.joint = parts.joint
        self.call = recorded_call(inputs)
        own = self.as_one_node(parts)
        self.functions = {policy: own or general}
        self.is_shared = own is not None and self.joint is not None

    def function(self, policy: Policy) -> Callable[..., Any] | None:
        """The graph's function under a policy; None if this graph serves others only. Raises `CompileError`."""
        found = self.functions.get(policy)
        if found is None and self.is_shared:
            assert self.joint is not None, "shared graphs have a joint graph"
            parts = Assembly(policy, self.cast)
            forward, backward = parts.divided(copied_graph(self.joint.module), None, self.joint.returns, {})
            parts.backward = write_backward(backward, ())
            parts.write_forward(forward, ())
            found = self.as_one_node(parts)
            if found is not None:
                self.functions[policy] = found
        return found

    def as_one_node(self, parts: "Assembly") -> Callable[..., Any] | None:
        """The programs as one node of autograd; None if only AOTAutograd's own wrapper serves the graph."""
        found, call = parts.found, self.call
        if call is None or found is None or found.count != self.count:
            return None
        if len(found.tangents) != sum(call.differentiable):
            return None
        return straight(found, call, under_autocast=self.under_autocast)


@dataclass(frozen=True)
class Joint:
    """A joint graph as AOTAutograd recorded it, to be divided once more."""

    module: Any
    returns: int  # results of forward, the first ones


def demand_no_settings(graph: Any) -> None:
    """Raise `CompileError` for a block that sets what the recorder of operators does not follow."""
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith(("set_", "_enter_inference_mode")):
            raise CompileError(f"it calls {name.removeprefix('_enter_')}")


class Assembly:
    """Collects the parts of one graph while PyTorch records it."""

    def __init__(self, policy: Policy, cast: Sequence[int]):
        self.policy = policy
        self.cast = cast  # places of weights that autocast may cast
        self.backward: Program | None = None
        self.found: Parts | None = None
        self.returns = 0
        self.tangents: tuple[tuple[int, ...], ...] = ()
        self.joint: Joint | None = None

    def divide(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> tuple[Any, Any]:
        # Dividing changes the graph. Settings that name nodes of this graph mean nothing for a copy.
        self.joint = Joint(copied_graph(joint), num_fwd_outputs)
        forward, backward = self.divided(joint, inputs, num_fwd_outputs, options)
        self.backward = write_backward(copied_graph(backward), ())  # AOTAutograd goes on with its own
        return forward, backward

    def divided(self, joint: Any, inputs: Any, returns: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """The graphs of forward and backward. This changes the joint graph."""
        given = joint.graph.find_nodes(op="placeholder")
        demand_single_casts(given[place] for place in self.cast)
        (output,) = joint.graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        join_views(joint.graph, {node for node in results[:returns] if isinstance(node, torch.fx.Node)})
        forward, backward = divide(self.policy, joint, inputs, num_fwd_outputs=returns, **options)
        self.returns = returns
        given = [n for n in backward.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
        self.tangents = tuple(node.meta["val"].stride() for node in given)
        return forward, backward

    def write_forward(self, module: Any, inputs: Sequence[Any]) -> Program:
        program = write_forward(module, inputs, returns=None if self.backward is None else self.returns)
        if self.backward is not None:
            (output,) = module.graph.find_nodes(op="output")
            results = list(output.args[0])
            returned = {base_of(node) for node in results[: self.returns] if isinstance(node, torch.fx.Node)}
            saved = results[self.returns :]
            cycles = tuple(place for place, node in enumerate(saved) if is_view(node) and base_of(node) in returned)
            count = len(module.graph.find_nodes(op="placeholder"))
            self.found = Parts(program, self.backward, count, cycles, self.tangents)
        return program
