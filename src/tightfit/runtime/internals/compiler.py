"""PyTorch's compiler: dynamo's switches, and inductor with a memory budget."""

import copy
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from tightfit.errors import CompileError
from tightfit.runtime.internals.dispatcher import no_modes
from tightfit.runtime.internals.kernels import kernels_without_text, replaced, writes_are_waited_for

SIGNATURES = 1000  # the most shapes, and constants such as a layer's number, for which one code object is compiled
without_dynamo = _disable_dynamo  # loads dynamo when the function is first called, not when it is defined


def compiled_code_off() -> Callable[[], None]:
    """Run compiled functions as eager code until the returned function is called. Does nothing without dynamo."""
    if getattr(sys.modules.get("torch._dynamo"), "__file__", None) is None:  # loading it takes seconds
        return lambda: None
    stance = torch.compiler.set_stance("force_eager")
    return partial(stance.__exit__, None, None, None)


@contextmanager
def compiled_code_on() -> Iterator[None]:
    """A context in which compiled functions run compiled, although `compiled_code_off` or a user's stance says no."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or getattr(getattr(frames, "_stance", None), "stance", "default") == "default":
        yield
        return
    with torch.compiler.set_stance("default"):
        yield


def compiler_is_loaded() -> bool:
    """True if dynamo and inductor are imported."""
    return "torch._inductor.compile_fx" in sys.modules


def load_compiler() -> None:
    """Import dynamo and inductor, which takes two seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch warns of itself
        import torch._dynamo.backends.common
        import torch._functorch.partitioners
        import torch._inductor.codegen.cpp
        import torch._inductor.compile_fx
        import torch._inductor.decomposition  # noqa: F401


def cancel_waiting_kernels() -> None:
    """Let inductor compile no kernel that it has not begun. Only for the end of a process: inductor remembers what was
    cancelled as being compiled, and would fail where it is needed again.
    """
    compiling = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    if compiling is not None and compiling.pool.cache_info().currsize:  # else the pool would be made here
        pool = compiling.pool()
        compiling.pool.cache_clear()
        pool.shutdown(wait=False, cancel_futures=True)


def compiler_is_disabled() -> bool:
    """True if `torch.compile` returns functions as they are (`TORCHDYNAMO_DISABLE`)."""
    from torch._dynamo import config  # takes seconds to import

    return bool(config.disable)


def inductor_with_budget(
    kind: str, share: float, graph: Any, inputs: Any, build: Callable[[str], Any] | None = None
) -> Any:
    """A backend of `torch.compile`: inductor with `activation_memory_budget=share` and eager random numbers.

    It raises `CompileError` if the backward of a block of this `kind` would draw random numbers again. With `build`,
    inductor's generated source is passed to `build`, which returns the module to use. No kernel is built then, and
    nothing remains in inductor's caches.
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
                "would be wrong: use keep=1, or no dropout"
            )
        written = nullcontext() if build is None else _written_only(build)
        with no_modes(), no_progress_bars(), inductor.patch(settings), writes_are_waited_for(), written:
            return compile_fx_inner(graph, *args, **kwargs)

    with functorch.patch(activation_memory_budget=share, **unseen), inductor.patch(settings):
        return compile_fx(graph, inputs, inner_compile=inner)


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
        # Partitions are for CUDA graphs. Around the kernels of a CPU they change no line.
        stack.enter_context(config.patch({"cpp.simdlen": 1, "graph_partition": False}))
        stack.enter_context(kernels_without_text())
        yield


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context in which PyTorch's interpreters of graphs make no progress bars, which nobody sees.

    The first one starts a thread that stays, and a process with threads cannot be forked.
    """
    from torch.fx import interpreter

    with replaced(interpreter, "tqdm", _NoBar):
        yield


class _NoBar:
    """Stands for a progress bar."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def update(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass


def many_compilations() -> AbstractContextManager[Any]:
    """A context in which a block may be compiled for up to `SIGNATURES` signatures (PyTorch's default is 8)."""
    from torch._dynamo import config  # takes seconds to import

    return config.patch(recompile_limit=SIGNATURES, accumulated_recompile_limit=SIGNATURES)


def decomposed(module: Any) -> Any:
    """A graph in the operators for which inductor writes kernels, with the shapes of its recorded inputs."""
    from torch._guards import detect_fake_mode  # these take seconds to import
    from torch._inductor import config as inductor
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    shapes = detect_fake_mode(inputs)
    assert shapes is not None, "graphs are recorded on fake tensors"
    drawn_alike = inductor.patch(fallback_random=True)
    with no_modes(), torch.no_grad(), no_progress_bars(), drawn_alike, _constants_among(shapes):
        # Random operators stay as they are, and so draw what eager code draws.
        table = {
            operator: rule
            for operator, rule in select_decomp_table().items()
            if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ())
        }
        return make_fx(torch.fx.Interpreter(module).run, decomposition_table=table)(*inputs)


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
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a graph of `decomposed`, as a function of a list of arguments, which it empties.

    It may write into the arguments at the places `used_up`. `build` is as for `inductor_with_budget`. `threads`: for
    how many the code is written, by default those of this process. Raises `CompileError`.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.exc import InductorError

    settings: dict[str, Any] = {"fallback_random": True}
    settings |= {} if build is None else {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    settings |= {} if threads is None else {"cpp.threads": threads}
    graph = copy.deepcopy(graph)  # inductor changes it
    inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    (output,) = graph.graph.find_nodes(op="output")
    # The other graph, or the caller, was recorded with these layouts.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
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
    ):
        try:
            return compile_fx_inner(graph, inputs, is_backward=is_backward)
        except InductorError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    raise CompileError(f"PyTorch's compiler: {reason}")


def inductor_source(graph: Any, used_up: Sequence[int], *, is_backward: bool, threads: int) -> str | None:
    """The Python that inductor writes for a graph of `decomposed`; None for a graph that calls nothing.

    The arguments are those of `inductor_program`.
    """
    sources: list[str] = []

    def build(source: str) -> types.ModuleType:
        sources.append(source)
        module = types.ModuleType("tightfit_source_of_inductor")
        module.__file__, module.__dict__["call"] = __file__, None
        return module

    inductor_program(graph, used_up, is_backward=is_backward, build=build, threads=threads)
    return sources[0] if sources else None
