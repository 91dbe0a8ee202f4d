"""Makes captured graphs: the functions that stand for a block's forward from then on, one for each policy."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.errors import CompileError
from tightfit.levers.captured.fused import Fused, fused_backward, fused_forward, write_ahead
from tightfit.levers.captured.in_place import is_opaque
from tightfit.levers.captured.partition import (
    base_of,
    demand_single_casts,
    divide,
    drop_tangents,
    is_view,
    single_gradients,
    sources_of_gradients,
)
from tightfit.levers.captured.program import write_backward, write_forward
from tightfit.levers.captured.straight import Program, ProgramParts, TensorLike, straight
from tightfit.levers.captured.views import join_views
from tightfit.levers.recompute.policy import Policy
from tightfit.runtime.internals import (
    autocast_is_active,
    copied_graph,
    recorded_call,
    recording_backend,
    sums_of_autograd,
)

# Python's operators that write into their first operand, and methods that do so and do not round.
WRITING = frozenset({operator.imul, operator.itruediv, operator.ipow, operator.imatmul})
EXACT = frozenset({"add_", "sub_", "copy_", "zero_", "fill_", "neg_", "conj_physical_", "requires_grad_", "detach_"})


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
        general = recording_backend(parts.divide, parts.write_forward, write_backward, parts.note_reads)(graph, inputs)
        self.count = len(inputs)
        self.joint = parts.joint
        self.call = recorded_call(inputs)
        own = self.as_one_node(parts)
        if own is None and any(count != 1 for count in parts.reads):
            raise CompileError(
                "its inputs and results are not plain tensors that share no memory, and it does not read each that "
                "needs a gradient exactly once"
            )
        self.functions: dict[tuple[Policy, bool], Callable[..., Any]] = {(policy, False): own or general}
        self.is_shared = own is not None and self.joint is not None
        self.unwritten: list[Fused] = []

    def prepare(self, policies: Iterable[Policy]) -> None:
        """Make the functions of compiled blocks under these policies, and write their code for dry runs, all at once.

        Does nothing where that is not possible: the function of each policy then says why.
        """
        if self.is_shared:
            for policy in policies:
                self.function(policy, fused=True)
            write_ahead(self.unwritten)
            self.unwritten.clear()

    def function(self, policy: Policy, *, fused: bool = False) -> Callable[..., Any] | None:
        """The graph's function under a policy; None if this graph serves others only. Raises `CompileError`.

        `fused` programs are PyTorch's compiler's.
        """
        fused = fused and self.joint is not None  # a block without gradients, whose graph was not divided
        found = self.functions.get((policy, fused))
        if found is None and fused and not self.is_shared:
            raise CompileError("their inputs and results are not plain tensors that share no memory")
        if found is None and self.is_shared:
            assert self.joint is not None, "shared graphs have a joint graph"
            parts = Assembly(policy, self.cast, fused=fused)
            parts.reads = self.joint.reads
            forward, backward = parts.divided(copied_graph(self.joint.module), self.joint.returns, {})
            parts.write(forward, backward)
            found = self.as_one_node(parts)
            if found is not None:
                self.functions[policy, fused] = found
                self.unwritten += parts.fused_programs
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
    reads: Sequence[int]  # gradients that autograd adds up, for each input that has one


def demand_no_settings(graph: Any) -> None:
    """Raise `CompileError` for a block that sets what the recorder of operators does not follow."""
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]  # a checkpoint's is one
    for node in (node for part in parts for node in part.graph.nodes):
        if node.kwargs.get("use_reentrant"):
            # Its own backward adds each gradient to a weight's by itself, and a program all of the block's at once.
            raise CompileError("it calls torch.utils.checkpoint with use_reentrant=True")
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith(("set_", "_enter_inference_mode")):
            raise CompileError(f"it calls {name.removeprefix('_enter_')}")
        if is_complex_in_place(node):
            raise CompileError(f"{called_name(node)} computes complex numbers in place, which rounds in its own way")


def called_name(node: Any) -> str:
    """The name of the function or method that a node of dynamo calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def is_complex_in_place(node: Any) -> bool:
    """True if a node of dynamo computes complex numbers into one of its operands, unlike the graph of operators."""
    value = node.meta.get("example_value")
    if node.op not in ("call_function", "call_method") or not isinstance(value, torch.Tensor) or not value.is_complex():
        return False
    name = called_name(node)
    is_in_place = (name.endswith("_") and not name.endswith("__")) or node.target in WRITING or "out" in node.kwargs
    return is_in_place and name not in EXACT


class Assembly:
    """Collects the parts of one graph while PyTorch records it."""

    def __init__(self, policy: Policy, cast: Sequence[int], *, fused: bool = False):
        self.policy = policy
        self.fused = fused
        self.used_up: tuple[int, ...] = ()  # places of saved tensors into which backward may write
        self.cast = cast  # places of weights that autocast may cast
        self.backward: Program | None = None
        self.found: ProgramParts | None = None
        self.returns = 0
        self.tangents: tuple[TensorLike, ...] = ()
        self.joint: Joint | None = None
        self.reads: Sequence[int] = ()
        self.sums: set[str] = set()  # names of nodes
        self.again: tuple[int, ...] = ()  # places of inputs with further gradients, which backward returns last
        self.partly: Callable[[frozenset[int]], Program] | None = None  # backward without some tangents
        self.sources: tuple[frozenset[int] | None, ...] = ()  # for each gradient the tangents that it is computed from
        self.fused_programs: list[Fused] = []

    def divide(self, joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> tuple[Any, Any]:
        # Dividing changes the graph. Settings that name nodes of this graph mean nothing for a copy.
        self.joint = Joint(copied_graph(joint), num_fwd_outputs, self.reads)
        forward, backward = self.divided(joint, num_fwd_outputs, options)
        self.write_own_backward(copied_graph(backward))  # AOTAutograd goes on with its own
        return forward, backward

    def note_reads(self, reads: Sequence[int]) -> None:
        self.reads = reads

    def write_own_backward(self, backward: Any) -> None:
        """Write the program of the graph of backward, which returns each gradient that autograd adds up by itself."""
        self.again = single_gradients(backward, self.sums, self.reads)
        self.sources = sources_of_gradients(backward)
        whole = copied_graph(backward)
        self.backward = write_backward(backward, ())

        @functools.cache
        def partly(missing: frozenset[int]) -> Program:
            some = copied_graph(whole)
            drop_tangents(some, missing, self.sums)
            return write_backward(some, ())

        self.partly = partly

    def divided(self, joint: Any, returns: int, options: dict[str, Any]) -> tuple[Any, Any]:
        """The graphs of forward and backward. This changes the joint graph."""
        given = joint.graph.find_nodes(op="placeholder")
        demand_single_casts(given[place] for place in self.cast)
        (output,) = joint.graph.find_nodes(op="output")
        results = tree_leaves(output.args)
        self.sums = sums_of_autograd(joint)
        join_views(joint.graph, {node for node in results[:returns] if isinstance(node, torch.fx.Node)})
        forward, backward = divide(self.policy, joint, num_fwd_outputs=returns, fused=self.fused, **options)
        self.returns = returns
        given = [n for n in backward.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
        self.tangents = tuple(TensorLike.of(node.meta["val"]) for node in given)
        return forward, backward

    def write(self, forward: Any, backward: Any) -> None:
        """Write the programs of graphs that were divided here."""
        if not self.fused:
            self.write_own_backward(backward)
            self.write_forward(forward, ())
            return
        self.used_up = used_up(forward, backward, self.returns)
        self.fused_programs = [fused_forward(forward), fused_backward(backward, self.used_up)]
        first, self.backward = (each.program() for each in self.fused_programs)
        self.sources = sources_of_gradients(backward)
        self.take(first, forward)

    def write_forward(self, module: Any, inputs: Sequence[Any]) -> Program:
        program = write_forward(module, returns=None if self.backward is None else self.returns)
        self.take(program, module)
        return program

    def take(self, program: Program, module: Any) -> None:
        """Note the program of the graph of forward, if there is one of backward."""
        if self.backward is not None:
            (output,) = module.graph.find_nodes(op="output")
            results = list(output.args[0])
            returned = {base_of(node) for node in results[: self.returns] if isinstance(node, torch.fx.Node)}
            saved = results[self.returns :]
            cycles = tuple(place for place, node in enumerate(saved) if is_view(node) and base_of(node) in returned)
            count = len(module.graph.find_nodes(op="placeholder"))
            self.found = ProgramParts(
                program,
                self.backward,
                count,
                cycles,
                self.tangents,
                self.used_up,
                again=self.again,
                partly=self.partly,
                sources=self.sources,
            )


def source_of(node: Any) -> Any:
    """The node that makes a value, which may be one of several."""
    return node.args[0] if node.target is operator.getitem else node


def used_up(forward: Any, backward: Any, returns: int) -> tuple[int, ...]:
    """The places of backward's inputs that nobody else holds: values inside of the block, each alone in its memory."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    bases = [base_of(node) for node in results if isinstance(node, torch.fx.Node)]
    saved = {
        node.name
        for node in results[returns:]
        if node.op == "call_function"
        and base_of(node) is node
        and bases.count(node) == 1
        and not is_opaque(source_of(node))
    }
    given = backward.graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(given) if node.name in saved)
