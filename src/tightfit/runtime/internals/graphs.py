"""PyTorch's tracers: dynamo, which records a block's forward, and AOTAutograd, which records its backward with it."""

import functools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.runtime.internals.compiler import SIGNATURES, no_progress_bars
from tightfit.runtime.internals.dispatcher import NoAutocast, no_modes
from tightfit.runtime.internals.tensors import is_fake

# Settings of `torch._functorch.config` for graphs that compute what eager code computes. A release may lack some.
_EXACT = {
    "enable_autograd_cache": False,  # a cached result would skip the partition
    "enable_remote_autograd_cache": False,
    "functionalize_rng_ops": False,  # random operators draw from the generator itself
    "donated_buffer": False,  # it would refuse `retain_graph=True`
    "backward_pass_autocast": "off",  # as eager code, whose backward runs outside of autocast
}


def recording_backend(
    divide: Callable[..., Any],
    write_forward: Callable[..., Any],
    write_backward: Callable[..., Any],
    note_reads: Callable[[list[int]], None],
) -> Callable[[Any, Sequence[Any]], Any]:
    """A backend of `torch.compile` that records the graphs of eager autograd, operator for operator.

    `divide` is the partition of the joint graph, and the next two make a function of each part. `note_reads` is called
    before them, with the number of gradients that autograd adds up for each input that has one.
    """
    from torch._dynamo.backends.common import aot_autograd  # these take seconds to import
    from torch._functorch import config
    from torch._inductor import config as inductor

    backend = aot_autograd(
        fw_compiler=write_forward, bw_compiler=write_backward, partition_fn=divide, decompositions={}
    )
    settings = {name: value for name, value in _EXACT.items() if hasattr(config, name)}

    def record(graph: Any, inputs: Sequence[Any]) -> Any:
        # Draws that nothing reads would be dropped otherwise, and the generator would not move.
        drawn = inductor.patch(fallback_random=True)
        with config.patch(settings), drawn, _kernels_of_eager_code(), _reads_counted(note_reads):
            return backend(graph, inputs)

    return record


@contextmanager
def _reads_counted(note: Callable[[list[int]], None]) -> Iterator[None]:
    """A context in which the backward that AOTAutograd traces is counted before it runs."""
    traced = torch.autograd.grad

    def counted(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        note(_reads(tree_leaves(outputs), tree_leaves(inputs)))
        return traced(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = counted
    try:
        yield
    finally:
        torch.autograd.grad = traced


def _reads(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[int]:
    """For each input, the edges to it in the graph of the outputs, each of which may bring a gradient."""
    from torch.autograd.graph import get_gradient_edge

    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, counts = set(waiting), Counter[tuple[Any, int]]()
    while waiting:
        for node, place in waiting.pop().next_functions:
            if node is not None:
                counts[node, place] += 1
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
    edges = map(get_gradient_edge, inputs)
    return [counts[edge.node, edge.output_nr] for edge in edges]


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which PyTorch neither logs what it cannot record nor warns of itself. The exception says so too."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            # Dynamo's word on Python 3.13.0. Where warnings are errors, it would end the capture.
            warnings.filterwarnings("ignore", message="Guards may run slower", category=RuntimeWarning)
            ignore_questions_for_gradients()
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def ignore_questions_for_gradients() -> None:
    """Suppress the warning that dynamo causes when it asks a block's input for its gradient."""
    message = r"The \.grad attribute of a Tensor that is not a leaf"
    warnings.filterwarnings("ignore", message=message, category=UserWarning, module=r"torch\._.*")


@contextmanager
def _kernels_of_eager_code() -> Iterator[None]:
    """A context in which AOTAutograd traces composite operators by their C++ kernels.

    PyTorch's Python kernels for them round differently (dropout, batch norm) or copy (dropout with p=0).
    """
    name = "enable_python_dispatcher"
    modules = [
        module
        for path, module in list(sys.modules.items())
        if path.startswith(("torch._functorch.", "torch.fx.experimental.proxy_tensor")) and name in vars(module)
    ]
    with ExitStack() as stack:
        for module in modules:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, nullcontext)
        yield


@dataclass(frozen=True)
class RecordedCall:
    """The results of a recorded function: for each result, whether it has gradients; and which are views inside.

    `written` are the places of inputs without gradients that it writes. Their new contents are its first results.
    `inputs` are results that are inputs: place of the result, place of the input.
    """

    differentiable: tuple[bool, ...]
    unsafe_views: tuple[int, ...]
    written: tuple[int, ...]
    inputs: tuple[tuple[int, int], ...]


def recorded_call(inputs: Sequence[Any]) -> RecordedCall | None:
    """The results of the function that was recorded last, or None unless inputs and results are plain and separate."""
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None or not all(type(i) in _PLAIN or is_fake(i) for i in inputs):
        return None
    infos = metadata.input_info
    written = tuple(place for place, info in enumerate(infos) if info.mutation_type.name == "MUTATED_OUT_GRAPH")
    # Only contents of buffers: autograd must know of other writes.
    hidden = any(infos[place].requires_grad or infos[place].mutates_metadata for place in written)
    kinds = [info.output_type for info in metadata.output_info]
    given = tuple(
        (place, info.base_idx)
        for place, info in enumerate(metadata.output_info)
        if info.output_type is OutputType.is_input and info.base_idx is not None and not info.requires_grad
    )
    simple = (OutputType.non_alias, OutputType.unsafe_view_alias)
    extras = (
        metadata.num_intermediate_bases,
        metadata.tokens,
        metadata.is_rng_op_functionalized,
        metadata.grad_enabled_mutation is not None,
    )
    if (
        hidden
        or any(extras)
        or metadata.num_mutated_inp_runtime_indices != len(written)
        or len(metadata.input_info) != len(inputs)
        or any(kind not in simple and place not in dict(given) for place, kind in enumerate(kinds))
    ):
        return None
    if any(not issubclass(info.raw_type, torch.Tensor) for info in metadata.output_info):
        return None
    views = tuple(place for place, kind in enumerate(kinds) if kind is OutputType.unsafe_view_alias)
    return RecordedCall(tuple(info.requires_grad for info in metadata.output_info), views, written, given)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def recording_settings() -> Iterator[None]:
    """A context in which dynamo records any number of signatures, and notices hooks that are registered later."""
    from torch._dynamo import config  # takes seconds to import

    # A collection of dynamo's own would come before dynamo lets go of its record, and make that old: only a collection
    # of everything, which takes a quarter of a second, would find it then.
    own: dict[str, Any] = {"run_gc_after_compile": False} if hasattr(config, "run_gc_after_compile") else {}
    settings = config.patch(
        recompile_limit=SIGNATURES,
        accumulated_recompile_limit=SIGNATURES,
        skip_nnmodule_hook_guards=False,
        assume_static_by_default=True,
        automatic_dynamic_shapes=False,
        specialize_float=True,
        trace_numpy=False,  # numpy's functions as those of torch round differently
        **own,
    )
    with settings, _quiet(), no_progress_bars():
        yield


@functools.cache
def drop_logs_of_limits(is_ours: Callable[[], bool]) -> None:
    """Drop what dynamo logs when it hits its limit of recompilations while `is_ours`. Its exception says the same."""
    logging.getLogger("torch._dynamo.convert_frame").addFilter(lambda record: not is_ours())


def recording_failures() -> tuple[type[Exception], ...]:
    """The exceptions with which dynamo ends if it cannot record a function."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def divide_joint_graph(
    joint: Any, saved: Sequence[Any], num_fwd_outputs: int, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The forward and the backward graph of a joint graph, between which the `saved` nodes are held."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    options = {name: value for name, value in options.items() if name == "static_lifetime_input_nodes"}
    with _use_lazy_graph_module(True):  # nobody runs the Python code that PyTorch would write for them
        return _extract_fwd_bwd_modules(joint, list(saved), [], num_fwd_outputs=num_fwd_outputs, **options)


def copied_graph(module: Any) -> Any:
    """A copy of a graph, with the same metadata. PyTorch writes Python code for it only if it is run."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    graph = torch.fx.Graph()
    (before,) = module.graph.find_nodes(op="output")
    graph.output(graph.graph_copy(module.graph, {})).meta.update(before.meta)
    return _LazyGraphModule(module, graph)


def recorded_value(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a recorded operator on tensors without data; None for a view that these tensors do not allow."""
    from torch._guards import detect_fake_mode

    shapes = detect_fake_mode((args, kwargs))
    with no_modes(), torch.no_grad(), NoAutocast(), nullcontext() if shapes is None else shapes:
        try:
            return target(*args, **kwargs)
        except (RuntimeError, ValueError):
            if target is torch.ops.aten.view.default:
                return None
            raise


def inputs_written_later(joint: Any) -> Iterator[Any]:
    """The inputs of a joint graph that the function writes in place. The graph returns their new content."""
    (output,) = joint.graph.find_nodes(op="output")
    written = [desc.mutated_input for desc in output.meta["desc"] if hasattr(desc, "mutated_input")]
    for node in joint.graph.find_nodes(op="placeholder"):
        if node.meta["desc"] in written:
            yield node
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        yield node.args[0]


def results_with_gradients(joint: Any) -> Iterator[tuple[Any, bool]]:
    """The results of forward for which backward takes gradients, each with whether it is a new content of an input."""
    (output,) = joint.graph.find_nodes(op="output")
    inputs = joint.graph.find_nodes(op="placeholder")
    given = [getattr(node.meta["desc"], "output", None) for node in inputs]
    results = tree_leaves(output.args)
    for result, desc in zip(results, output.meta["desc"], strict=True):
        if isinstance(result, torch.fx.Node) and desc in given:
            yield result, hasattr(desc, "mutated_input")


def sums_of_autograd(joint: Any) -> set[str]:
    """The names of the nodes of a joint graph that add up gradients of one value, outside of any operator's formula."""
    # PyTorch notes the number of the forward operator whose gradient a node is of. Sums have the latest number.
    latest = max((node.meta.get("seq_nr", -1) for node in joint.graph.nodes), default=-1)
    return {
        node.name
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        if is_of_backward(node) and node.meta.get("seq_nr") == latest and not node.kwargs
    }


def is_of_backward(node: Any) -> bool:
    """True if autograd's backward computes a node of a joint graph."""
    return node.meta.get("partitioner_tag") == "is_backward"


def boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function of one list of arguments, which it empties."""
    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def sizes_are_static(value: Any) -> bool:
    """True if the value of a node has no size, and is no number, that depends on data."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, list | tuple):
        return all(map(sizes_are_static, value))
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, symbols)
    return not any(isinstance(size, symbols) for size in (*value.shape, *value.stride()))
