"""Runs the code that PyTorch's compiler generates for a block in a dry run, with kernels that compute nothing.

Inductor writes Python around its kernels. That Python allocates memory, calls kernels and operators, and deletes names,
so it decides which memory compiled code holds and when. It runs here unchanged, between the same saved tensors that
autograd keeps in a real step. Only the kernels are replaced, and they are never built.
"""

import functools
import re
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tightfit.errors import CompileError
from tightfit.levers.activity import simulators
from tightfit.levers.compiled import own_forward
from tightfit.runtime.internals import compiled_code_on, inductor_with_budget, is_active, many_compilations, no_modes
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda.answers import properties_of, simulated_card
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.shapes import TensorShape

KERNEL = "tightfit.compiled"  # a fused kernel, as an operator of a trace


@contextmanager
def compiled_code_simulated(dry: DryRun) -> Iterator[None]:
    """A context in which compiled blocks run the compiler's generated code, and the trace records it.

    The programs of captured blocks run as they are, since they consist of ATen operators.
    """
    simulators.compiled = simulators.captured = CompiledRunner(dry)
    try:
        yield
    finally:
        simulators.compiled = simulators.captured = None


class CompiledRunner:
    """Runs compiled blocks in one dry run."""

    def __init__(self, dry: DryRun):
        self.dry = dry
        card = simulated_card()
        self.card = None if card is None else properties_of(card)  # for which PyTorch's compiler writes code

    def __call__(self, module: nn.Module, share: float, args: tuple, kwargs: dict) -> Any:
        """The block's forward, compiled. Raises `CompileError` if the compiler cannot compile all of it."""
        from torch._dynamo import exc  # takes seconds to import
        from torch._inductor.exc import InductorError

        forward = written_forward(type(module), share, simulation.card)
        try:
            # dynamo leaves code alone under a dispatch mode; `run` activates the dry run again for the generated code.
            with self.dry.modules.paused(), no_modes(), many_compilations():
                return forward(module, *args, **kwargs)
        except (exc.TorchDynamoException, InductorError) as error:
            # Dynamo's own text begins with the name of the backend. A name here would hold the block's input.
            reason = next(iter(str(getattr(error, "inner_exception", error)).strip().splitlines()), "no reason is said")
            traceback.clear_frames(error.__traceback__)  # the frames hold the block's input, and would count as memory
        where = self.dry.modules.current or type(module).__name__
        raise CompileError(f"{where} cannot be compiled as a whole: {reason}")

    @contextmanager
    def outside(self) -> Iterator[None]:
        """A context outside of the dry run, in which dynamo records blocks; `run` activates it again for a program."""
        with self.dry.modules.paused(), compiled_code_on(), no_modes():
            yield

    def build(self, source: str) -> types.ModuleType:
        """The module that inductor generated, without kernels."""
        return without_kernels(source)

    def run(self, call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the generated code of forward or backward under the dry run."""
        if is_active(self.dry):
            return call(args)
        # AOTAutograd runs a compiled function for the first time under a mode of its own, which looks for custom
        # operators whose results alias. It is no dry run: products would run on tensors without memory.
        with no_modes(), self.dry:
            return call(args)

    def kernel(self, is_read: list[bool], args: tuple[Any, ...]) -> None:
        """Record the call of a kernel, which reads and writes all of its tensors once."""
        dry = self.dry
        index = dry.begin([])
        reads, written = [], []
        for argument, only_read in zip(args, is_read, strict=True):
            if isinstance(argument, torch.Tensor):
                (reads if only_read else written).append((dry.see(argument), TensorShape.of(argument)))
        seconds = dry.cost(KERNEL, [shape for _, shape in reads], [shape for _, shape in written], ())
        makes = []
        for cell, _ in written:
            cell.known = False
            makes.append(dry.ledger.new_value(cell, index))
        dry.note(KERNEL, seconds, reads=tuple(cell.value for cell, _ in reads), makes=tuple(makes))


def compiled_runner() -> CompiledRunner:
    assert isinstance(simulators.compiled, CompiledRunner), "compiled code is written for dry runs"
    return simulators.compiled


@functools.cache
def written_forward(kind: type[nn.Module], share: float, card: Any) -> Callable[..., Any]:
    """The `forward` of a class of modules, compiled to code without kernels; separate from the real compilations, and
    for each `card` that CPU tensors simulate.
    """
    properties = None if card is None else properties_of(card)
    backend = functools.partial(inductor_with_budget, kind.__name__, share, build=without_kernels, card=properties)
    return torch.compile(own_forward(kind, "written"), backend=backend, fullgraph=True, dynamic=False)


def without_kernels(source: str) -> types.ModuleType:
    """The module that inductor generated, with kernels that compute nothing and allocations that the dry run sees."""
    from torch._inductor import async_compile

    module = types.ModuleType("tightfit_written_by_inductor")
    module.__file__ = __file__
    real = async_compile.AsyncCompile
    async_compile.AsyncCompile = KernelWriter  # pyright: ignore[reportAttributeAccessIssue]  (what the code imports)
    try:
        exec(compile(_without_driver(source), "<written by inductor>", "exec"), module.__dict__)
    finally:
        async_compile.AsyncCompile = real
    for name in ("empty_strided_cpu", "empty_strided_cuda"):
        module.__dict__[name] = fresh
    module.__dict__["device"] = lambda *named, **said: torch.device("cpu")  # where tensors of a dry run are
    call = module.__dict__["call"]
    module.__dict__["call"] = lambda args: compiled_runner().run(call, args)
    return module


# Lines that inductor writes for a card, by what stands in their place: a dry run has no driver, and may have no Triton.
_OF_DRIVER = {
    "import triton\n": "\n",
    "import triton.language as tl\n": "\n",
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream\n": "get_raw_stream = int\n",
    "with torch.cuda._DeviceGuard(0):\n": "if True:\n",
    "torch.cuda.set_device(0)\n": "pass\n",
}


def _without_driver(source: str) -> str:
    for line, other in _OF_DRIVER.items():
        source = source.replace(line, other)
    return source


def fresh(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Replaces the allocating function of the generated code."""
    return torch.empty_strided(shape, stride, dtype=dtype)


class KernelWriter:
    """Replaces inductor's compiler of kernels."""

    def cpp_pybinding(self, argument_types: list[str], source: str) -> Callable[..., None]:
        is_read = [kind.startswith("const ") for kind in argument_types]
        return lambda *args: compiled_runner().kernel(is_read, args)

    def triton(self, name: str, source: str, **_: Any) -> Any:
        declared = re.search(rf"^def {name}\((.*?)\):$", source, re.MULTILINE)
        assert declared is not None, "inductor writes a function for each kernel"
        arguments = [each.split(":")[0].strip() for each in declared[1].split(",")]
        is_read = [each.startswith("in_ptr") for each in arguments]

        def run(*args: Any, stream: int) -> None:
            compiled_runner().kernel(is_read[: len(args)], args)

        return types.SimpleNamespace(run=run)

    def wait(self, scope: dict[str, Any]) -> None:
        pass  # no kernel is built, so there is nothing to wait for
