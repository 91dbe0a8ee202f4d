"""Inductor: graphs as its code, with a memory budget or as they were divided, built or only written."""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from tightfit.errors import CompileError
from tightfit.runtime.internals.cards import inductor_on, interpreter_of, on_card
from tightfit.runtime.internals.compiler import no_progress_bars
from tightfit.runtime.internals.dispatcher import no_modes
from tightfit.runtime.internals.graphs import copied_graph
from tightfit.runtime.internals.kernels import kernels_without_text, replaced, writes_are_waited_for


def inductor_with_budget(
    kind: str, share: float, graph: Any, inputs: Any, build: Callable[[str], Any] | None = None, card: Any = None
) -> Any:
    """A backend of `torch.compile`: inductor with `activation_memory_budget=share` and eager random numbers.

    It raises `CompileError` if the backward of a block of this `kind` would draw random numbers again. With `build`,
    inductor's generated source is passed to `build`, which returns the module to use. No kernel is built then, and
    nothing remains in inductor's caches. With the properties of a `card` the source is for it.
    """
    from torch._functorch import config as functorch  # these take seconds to import
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # The cache of whole autograd functions would skip the check below.
    unseen: dict[str, Any] = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    settings: dict[str, Any] = {"fallback_random": True}
    settings |= {} if build is None else {"fx_graph_cache": False, "fx_graph_remote_cache": False}

    def inner(graph: Any, *args: Any, **kwargs: Any) -> Any:  # called again for backward, while the step runs
        # PyTorch 2.13 recomputes dropout with other random numbers for a share below 1: the same loss, and gradients
        # off by 1e-2 (notes/compiled-and-captured.md, "Compiled blocks").
        if kwargs.get("is_backward") and any(map(_draws_random_numbers, graph.graph.nodes)):
            raise CompileError(
                f"{kind}: PyTorch's compiler draws random numbers (dropout) again when it recomputes, and gradients "
                f"would be wrong: use {'' if share == 1 else 'keep=1, or '}no dropout"
            )
        written = nullcontext() if build is None else _written_only(build)
        on = nullcontext() if card is None else inductor_on(card)
        with no_modes(), no_progress_bars(), inductor.patch(settings), writes_are_waited_for(), written, on:
            if card is not None:
                graph, args = _of_card(graph), (on_card(args[0]), *args[1:])
            return compile_fx_inner(graph, *args, **kwargs)

    with functorch.patch(activation_memory_budget=share, **unseen), inductor.patch(settings):
        return compile_fx(graph, inputs, inner_compile=inner)


def _of_card(module: Any) -> Any:
    """A graph with a card's tensors in the place of a CPU's."""
    from torch._guards import detect_fake_mode  # takes seconds to import
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    shapes = detect_fake_mode(inputs)
    with torch.no_grad(), _constants_among(shapes):
        made = make_fx(interpreter_of(module, is_on_card=True).run)(*on_card(inputs))
    (before,), (after,) = (each.graph.find_nodes(op="output") for each in (module, made))
    after.meta.update(before.meta)
    return made


def _draws_random_numbers(node: Any) -> bool:
    """True if a node of a graph is a random operator, or one that sets the generator's state around it."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return "rng_state" in str(node.target)
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    return dict(zip(names, node.args, strict=False)).get("dropout_p", 0) != 0  # attention draws only for dropout


@contextmanager
def _written_only(build: Callable[[str], Any]) -> Iterator[None]:
    """A context in which inductor passes its generated source to `build` instead of loading it.

    Nobody compiles its kernels, so they have no text and no vectors. What is allocated around them is the same.
    """
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.graph import GraphLowering

    with ExitStack() as stack:
        # To find out what vectors this machine has, inductor would compile small programs: a second of a first plan.
        stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", list))
        stack.enter_context(replaced(GraphLowering, "_compile_to_module_lines", lambda self, code: build(code.value)))
        # Partitions are for CUDA graphs. Without these they change no line around kernels.
        stack.enter_context(config.patch({"cpp.simdlen": 1, "graph_partition": False}))
        stack.enter_context(kernels_without_text())
        yield


def decomposed(module: Any, card: Any = None) -> Any:
    """A graph in the operators for which inductor writes kernels, with the shapes of its recorded inputs.

    With the properties of a `card`, tensors of the CPU are its own in the result.
    """
    from torch._guards import detect_fake_mode  # these take seconds to import
    from torch._inductor import config as inductor
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    (output,) = module.graph.find_nodes(op="output")
    shapes = detect_fake_mode(inputs)
    assert shapes is not None, "graphs are recorded on fake tensors"
    if card is not None:
        inputs = on_card(inputs)
    drawn_alike = inductor.patch(fallback_random=True)
    written_for = nullcontext() if card is None else inductor_on(card)
    with no_modes(), torch.no_grad(), no_progress_bars(), drawn_alike, _constants_among(shapes), written_for:
        # Random operators stay as they are, and so draw what eager code draws.
        table = {
            operator: rule
            for operator, rule in select_decomp_table().items()
            if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ())
        }
        run = interpreter_of(module, is_on_card=card is not None).run

        def as_recorded(*given: Any) -> list[Any]:
            return [_laid_as(made, node) for made, node in zip(run(*given), output.args[0], strict=True)]

        return make_fx(as_recorded, decomposition_table=table)(*inputs)


def _laid_as(made: Any, node: Any) -> Any:
    """A result that lies in memory as the recorded node's: a decomposition may copy less (`cat` with nothing)."""
    if not isinstance(made, torch.Tensor):
        return made
    stride = node.meta["val"].stride()
    places = zip(made.shape, made.stride(), stride, strict=True)
    if made.numel() == 0 or all(size == 1 or own == its for size, own, its in places):
        return made
    return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)


@contextmanager
def _constants_among(shapes: Any) -> Iterator[None]:
    """A context in which operators return fake tensors, for real ones too: a graph's constants."""
    before, shapes.allow_non_fake_inputs = shapes.allow_non_fake_inputs, True
    try:
        with shapes:
            yield
    finally:
        shapes.allow_non_fake_inputs = before


def inductor_program(
    graph: Any,
    used_up: Sequence[int],
    *,
    is_backward: bool,
    build: Callable[[str], Any] | None = None,
    threads: int | None = None,
    card: Any = None,
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a graph of `decomposed`, as a function of a list of arguments, which it empties.

    It may write into the arguments at the places `used_up`. `build` is as for `inductor_with_budget`. `threads`: for
    how many the code is written, by default those of this process. `card`: the properties for which `decomposed` made
    the graph. Raises `CompileError`.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError

    settings: dict[str, Any] = {"fallback_random": True}
    settings |= {} if build is None else {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    settings |= {} if threads is None else {"cpp.threads": threads}
    graph = copied_graph(graph)  # inductor changes it; a deep copy's tensors would lie otherwise
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (output,) = graph.graph.find_nodes(op="output")
    # The other graph, or the caller, was recorded with these layouts.
    is_tensor = [isinstance(each, torch.fx.Node) for each in output.args[0]]  # else None: no gradient
    output.meta["user_visible_output_idxs"] = [place for place, visible in enumerate(is_tensor) if visible]
    context = TracingContext(detect_fake_mode(inputs))
    context.fw_metadata = types.SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]  (what inductor reads of it)
        bw_donated_idxs=list(used_up) if is_backward else [], static_input_indices=[]
    )
    with (
        no_modes(),
        tracing(context),
        no_progress_bars(),
        inductor.patch(settings),
        writes_are_waited_for(),
        nullcontext() if build is None else _written_only(build),
        nullcontext() if card is None else inductor_on(card),
    ):
        try:
            return compile_fx_inner(graph, inputs, is_backward=is_backward)
        except InductorError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise CompileError(f"PyTorch's compiler: {reason}")


def inductor_source(
    graph: Any, used_up: Sequence[int], *, is_backward: bool, threads: int, card: Any = None
) -> str | None:
    """The Python that inductor writes for a graph of `decomposed`; None for a graph that calls nothing.

    The arguments are those of `inductor_program`.
    """
    sources: list[str] = []

    def build(source: str) -> types.ModuleType:
        sources.append(source)
        module = types.ModuleType("tightfit_source_of_inductor")
        module.__file__, module.__dict__["call"] = __file__, None
        return module

    inductor_program(graph, used_up, is_backward=is_backward, build=build, threads=threads, card=card)
    return sources[0] if sources else None
