"""PyTorch's compiler: dynamo's switches, and inductor with a memory budget."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo

from tightfit.errors import CompileError
from tightfit.runtime.internals.dispatcher import no_modes

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


def compiler_is_disabled() -> bool:
    """Whether `torch.compile` returns functions as they are (`TORCHDYNAMO_DISABLE`)."""
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
        # off by 1e-2 (docs/lab-notes.md, "Compiled blocks").
        if kwargs.get("is_backward") and any(map(_draws_random_numbers, graph.graph.nodes)):
            raise CompileError(
                f"{kind}: PyTorch's compiler draws random numbers (dropout) again when it recomputes, and gradients "
                "would be wrong: use keep=1, or no dropout"
            )
        with no_modes(), inductor.patch(settings), nullcontext() if build is None else _written_only(build):
            return compile_fx_inner(graph, *args, **kwargs)

    with functorch.patch(activation_memory_budget=share, **unseen), inductor.patch(settings):
        return compile_fx(graph, inputs, inner_compile=inner)


def _draws_random_numbers(node: Any) -> bool:
    """Whether a node of a graph is a random operator, or one that sets the generator's state around it."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return "rng_state" in str(node.target)
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    return dict(zip(names, node.args, strict=False)).get("dropout_p", 0) != 0  # attention draws only for dropout


@contextmanager
def _written_only(build: Callable[[str], Any]) -> Iterator[None]:
    """A context in which inductor passes its generated source to `build` instead of loading it."""
    from torch._inductor.graph import GraphLowering

    name = "_compile_to_module_lines"
    loading = getattr(GraphLowering, name)
    setattr(GraphLowering, name, lambda self, code: build(code.value))
    try:
        yield
    finally:
        setattr(GraphLowering, name, loading)


def many_compilations() -> AbstractContextManager[Any]:
    """A context in which a block may be compiled for up to `SIGNATURES` signatures (PyTorch's default is 8)."""
    from torch._dynamo import config  # takes seconds to import

    return config.patch(recompile_limit=SIGNATURES, accumulated_recompile_limit=SIGNATURES)
