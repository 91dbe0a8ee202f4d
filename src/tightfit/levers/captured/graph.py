"""Makes one captured graph: the function that stands for a block's forward from then on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.errors import CompileError
from tightfit.levers.captured.partition import base_of, demand_single_casts, divide, is_view
from tightfit.levers.captured.program import write_backward, write_forward
from tightfit.levers.captured.straight import Parts, Program, straight
from tightfit.levers.captured.views import join_views
from tightfit.levers.recompute.policy import Policy
from tightfit.runtime.internals import autocast_is_active, recorded_call, recording_backend


def captured_graph(policy: Policy, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` under a policy. Raises `CompileError` for a graph that cannot be captured."""
    demand_no_settings(graph)
    under_autocast = autocast_is_active()
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    weights = [place for place, name in enumerate(names) if "_parameters_" in name]
    parts = Assembly(policy, weights if under_autocast else ())
    general = recording_backend(parts.divide, parts.write_forward, write_backward)(graph, inputs)
    call = recorded_call(inputs)
    if call is None or parts.found is None or parts.found.count != len(inputs):
        return general
    if len(parts.found.tangents) != sum(call.differentiable):
        return general
    return straight(parts.found, call, under_autocast=under_autocast)


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

    def divide(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> tuple[Any, Any]:
        given = joint.graph.find_nodes(op="placeholder")
        demand_single_casts(given[place] for place in self.cast)
        (output,) = joint.graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        join_views(joint.graph, {node for node in results[:num_fwd_outputs] if isinstance(node, torch.fx.Node)})
        forward, backward = divide(self.policy, joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        self.returns = num_fwd_outputs
        given = [n for n in backward.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
        self.tangents = tuple(node.meta["val"].stride() for node in given)
        self.backward = write_backward(copied(backward), ())
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


def copied(module: Any) -> Any:
    """A copy of a graph, with the same metadata."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return torch.fx.GraphModule(module, graph)
