"""What we use of PyTorch that is not its public interface, all in one place: what to look at when a release moves it.

Each is there in torch 2.11, 2.12 and 2.13, or what stands in for it says so.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import _engine_run_backward
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tightfit.errors import CompileError

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (the stub does not know it)

ENGINE_CODE = _engine_run_backward.__code__  # the frame from which the engine calls operators of its own
NoAutocast = torch._C._DisableAutocast
_COUNTS_WRITES = torch._C.DispatchKey.ADInplaceOrView  # where aliases get their shared version counter
# Excluded in what a dispatch mode calls: autograd, and what `torch.vmap` stands on.
_ABOVE_KERNELS = [
    getattr(torch._C.DispatchKey, name)
    for name in (
        "AutogradFunctionality",
        "ADInplaceOrView",
        "FuncTorchDynamicLayerFrontMode",
        "FuncTorchDynamicLayerBackMode",
        "FuncTorchBatched",
        "FuncTorchVmapMode",
    )
]
no_torch_dispatch: Any = torch._C._disabled_torch_dispatch_impl  # what plain tensors have
no_torch_function: Any = torch._C._disabled_torch_function_impl  # for classes of tensors that dispatch themselves
_allocator_words: list[str] = []  # what `set_allocator_settings` was last given, if anything
SIGNATURES = 1000  # shapes, and constants such as a layer's number, that code is compiled for
without_dynamo = _disable_dynamo  # loads dynamo when the function is first called, not when it is defined

__all__ = [
    "ENGINE_CODE",
    "NoAutocast",
    "allocator_settings",
    "as_outside_of_kernels",
    "at_end_of_backward",
    "attention_priority",
    "autocast_cache_cleared_by",
    "clear_cublas_workspaces",
    "compiled_code_off",
    "counting_alias",
    "cudnn_attention_is_preferred",
    "current_node",
    "dispatch_is_watched",
    "fake_mode_is_active",
    "fallthrough",
    "foreach_on_cpu",
    "forget_unscaled",
    "fused_kernel_devices",
    "graph_is_kept",
    "has_kernel",
    "inductor_with_budget",
    "is_dense",
    "is_fake",
    "is_innermost",
    "is_profiling",
    "is_shared",
    "kernels_replaced",
    "many_compilations",
    "newest_sequence_number",
    "no_modes",
    "no_torch_dispatch",
    "no_torch_function",
    "operators_with_kernel",
    "register_pages",
    "set_allocator_settings",
    "set_version_counters",
    "tensor_without_memory",
    "text_of_tensors_by",
    "transforms_are_active",
    "unregister_pages",
    "without_dynamo",
]


def clear_cublas_workspaces() -> None:
    """Give back the scratch memory that cuBLAS keeps; only on a build with CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces")()  # noqa: B009 (builds without CUDA do not have it)


def allocator_settings() -> str:
    """The device allocator's settings as they were last set, in the words of `PYTORCH_ALLOC_CONF`."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return ask()
    # torch 2.11 does not tell, 2.12 does: what was set here, else the variables in the order in which torch reads them.
    if _allocator_words:
        return _allocator_words[-1]
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")


def set_allocator_settings(words: str) -> None:
    """Set the device allocator's settings. Raises `ValueError` or `RuntimeError` where torch does not take them."""
    torch._C._accelerator_setAllocatorSettings(words)
    _allocator_words[:] = [words]


def compiled_code_off() -> Callable[[], None]:
    """Run what was compiled as it was written, until what this returns is called. Nothing where nothing is compiled."""
    if getattr(sys.modules.get("torch._dynamo"), "__file__", None) is None:  # not loaded: that takes seconds
        return lambda: None
    stance = torch.compiler.set_stance("force_eager")
    return partial(stance.__exit__, None, None, None)


def inductor_with_budget(
    kind: str, share: float, graph: Any, inputs: Any, build: Callable[[str], Any] | None = None
) -> Any:
    """A backend of `torch.compile`: inductor, of which the backward may keep this share of what it would like to, and
    which draws the random numbers that eager code draws. Where the backward of a block of this `kind` would draw them
    anew, it raises `CompileError`.

    With `build` what inductor writes is handed to that, which returns the module that stands for it: no kernel is
    built, and nothing of it is left where a real compilation would find it.
    """
    from torch._functorch import config as functorch  # these take seconds to import
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    # The cache of whole autograd functions would leave out the check below.
    unseen: dict[str, Any] = {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}
    settings: dict[str, Any] = {"fallback_random": True}
    settings |= {} if build is None else {"fx_graph_cache": False, "fx_graph_remote_cache": False}

    def inner(graph: Any, *args: Any, **kwargs: Any) -> Any:  # for backward called once more, while the step runs
        if kwargs.get("is_backward") and any(map(_draws_random_numbers, graph.graph.nodes)):
            raise CompileError(
                f"{kind}: recomputed within compiled code, random numbers (dropout) are drawn anew by PyTorch's "
                "compiler, and gradients would be wrong: keep=1, or no dropout"
            )
        with no_modes(), inductor.patch(settings), nullcontext() if build is None else _written_only(build):
            return compile_fx_inner(graph, *args, **kwargs)

    with functorch.patch(activation_memory_budget=share, **unseen), inductor.patch(settings):
        return compile_fx(graph, inputs, inner_compile=inner)


def _draws_random_numbers(node: Any) -> bool:
    """Whether a node of a graph is a random operator, bare or under one that sets the generator's state."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return "rng_state" in str(node.target)
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    return dict(zip(names, node.args, strict=False)).get("dropout_p", 0) != 0  # attention draws only what it drops


@contextmanager
def _written_only(build: Callable[[str], Any]) -> Iterator[None]:
    """Inside, inductor hands over what it has written instead of loading it."""
    from torch._inductor.graph import GraphLowering

    name = "_compile_to_module_lines"
    loading = getattr(GraphLowering, name)
    setattr(GraphLowering, name, lambda self, code: build(code.value))
    try:
        yield
    finally:
        setattr(GraphLowering, name, loading)


def many_compilations() -> AbstractContextManager[Any]:
    """Inside, a block may be compiled for as many signatures as come (PyTorch gives up after 8)."""
    from torch._dynamo import config  # takes seconds to import

    return config.patch(recompile_limit=SIGNATURES, accumulated_recompile_limit=SIGNATURES)


@contextmanager
def no_modes() -> Iterator[None]:
    """Inside, no dispatch mode is active."""
    with _disable_current_modes():
        yield


def dispatch_is_watched() -> bool:
    """Whether a dispatch mode is active in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made under PyTorch's `FakeTensorMode`: it says that it lies somewhere, and has no memory."""
    fake_tensors: Any = sys.modules.get("torch._subclasses.fake_tensor")
    return fake_tensors is not None and isinstance(tensor, fake_tensors.FakeTensor)


def fake_mode_is_active() -> bool:
    """Whether the user is within a `FakeTensorMode`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def fused_kernel_devices() -> list[str]:
    """The kinds of devices on which optimizers have fused kernels."""
    return _get_fused_kernels_supported_devices()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory they span, each once."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def tensor_without_memory(kind: type, like: torch.Tensor, strides: Sequence[int] | None = None) -> Any:
    """A tensor of a class that dispatches itself, with another one's shape, dtype and device and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, like.size(), strides=strides, dtype=like.dtype, device=like.device)


@contextmanager
def text_of_tensors_by(contents: Callable[[torch.Tensor], str | None]) -> Iterator[None]:
    """Inside, `repr` of a tensor writes what `contents` returns in the place of its numbers, unless that is None."""
    from torch import _tensor_str

    write = _tensor_str._str

    def text(self: torch.Tensor, *, tensor_contents: str | None = None) -> str:
        return write(self, tensor_contents=contents(self) if tensor_contents is None else tensor_contents)

    _tensor_str._str = text  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        _tensor_str._str = write


def current_node() -> Any:
    """The autograd node whose backward is running, or None."""
    return torch._C._current_autograd_node()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something when the backward that is running has ended; only inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def transforms_are_active() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, `jvp`, ...) is running in this thread."""
    return torch._C._are_functorch_transforms_active()


def is_innermost(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is the one entered last in this thread."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode


def is_profiling() -> bool:
    """Whether a profiler of PyTorch runs; there can be one at a time."""
    return _autograd._profiler_enabled()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether anybody but this tensor holds its storage: a tensor, a graph, a view."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor, and the storage's own Python object


def register_pages(address: int, nbytes: int) -> bool:
    """Pin pages of host memory for CUDA. False where there is no room for it. Raises `CudaError` for other reasons."""
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(address, nbytes, 0)
    if int(status) == 2:  # cudaErrorMemoryAllocation, driver_types.h
        return False
    torch.cuda.check_error(status)
    return True


def unregister_pages(address: int) -> None:
    """Let go of pages that were pinned."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostUnregister(address))


def counting_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, but with its count of in-place writes, also from below autograd."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_WRITES)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, excluded)


@contextmanager
def as_outside_of_kernels() -> Iterator[None]:
    """Inside an operator's own kernel, autograd and `torch.vmap` work, also where a dispatch mode called it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _ABOVE_KERNELS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def graph_is_kept() -> bool:
    """Whether the running backward pass leaves saved tensors for another one (`retain_graph=True`)."""
    # Where a release drops the question, the careful answer: a gradient is then copied once.
    asked = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else asked()


def newest_sequence_number() -> int:
    """The sequence number of the node made last in this thread."""
    return _autograd._get_sequence_nr() - 1


def set_version_counters(tensors: Iterable[torch.Tensor], versions: Iterable[int]) -> None:
    """Set the in-place counters of tensors."""
    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


# What a CPU needs in order to play CUDA

fallthrough = torch.library.fallthrough_kernel  # as a kernel of a key: go on to the next one
_BACKENDS = {0: "math", 1: "flash_attention", 2: "efficient_attention", 3: "cudnn_attention"}
# `sdp_priority_order` in ATen/Context.h
_DEFAULT_PRIORITY = ["flash_attention", "efficient_attention", "math", "cudnn_attention"]


def cudnn_attention_is_preferred() -> bool:
    """Whether cuDNN's attention comes first on the cards that it is for; without CUDA, as in a build for CUDA 13.

    Source: `check_prefer_cudnn_attention` in ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0") == "1":
        return False
    version = torch.backends.cudnn.version()
    return version is None or version > 91500


def has_kernel(operator: str, key: str) -> bool:
    """Whether there is an operator (`"aten::mm"`) in this release and it has its own kernel for a dispatch key."""
    known = torch._C._dispatch_has_kernel(operator)  # asked about a key, torch raises for what it does not have
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def operators_with_kernel(key: str) -> list[str]:
    """The operators that have a kernel of their own for a dispatch key."""
    names = torch._C._dispatch_get_all_op_names()
    return _with_kernel(key, len(names))


@functools.cache
def _with_kernel(key: str, known: int) -> list[str]:
    """Asked again where more operators are `known` than before: a library was loaded."""
    return [name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, key)]


def attention_priority() -> tuple[list[str], bool]:
    """The attention backends that are switched on, in the order of preference, and whether that is the default one."""
    switches: Any = torch.backends.cuda
    enabled = {
        "math": switches.math_sdp_enabled(),
        "flash_attention": switches.flash_sdp_enabled(),
        "efficient_attention": switches.mem_efficient_sdp_enabled(),
        "cudnn_attention": switches.cudnn_sdp_enabled(),
    }
    order = [_BACKENDS[number] for number in torch._C._get_sdp_priority_order() if number in _BACKENDS]
    return [name for name in order if enabled[name]], order == _DEFAULT_PRIORITY


@contextmanager
def kernels_replaced(kernels: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """Inside, ATen operators have these kernels: name (`"mm"`, `"pow.Scalar"`), dispatch key and function."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # it is what is wanted
            for name, key, kernel in kernels:
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


@contextmanager
def foreach_on_cpu() -> Iterator[None]:
    """Inside, optimizers choose between their implementations for CPU tensors as they do for those of CUDA."""
    module: Any = sys.modules["torch.optim.optimizer"]
    devices = module._get_foreach_kernels_supported_devices
    module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a gradient scaler unscale the gradients of its optimizers anew: those that it has unscaled are gone."""
    scaler._per_optimizer_states.clear()


@contextmanager
def autocast_cache_cleared_by(clear: Callable[[], None]) -> Iterator[None]:
    """Inside, `clear` is called too whenever autocast drops the weights that it has cast."""
    original = torch.clear_autocast_cache

    def both() -> None:
        clear()
        original()

    torch.clear_autocast_cache = both
    try:
        yield
    finally:
        torch.clear_autocast_cache = original
        clear()


def ignore_hooks_around_selective_checkpoints() -> None:
    """Leave out the warning of PyTorch 2.15 about saved-tensor hooks around a selective checkpoint of the model's own:
    the hooks are our executor's, and it counts on what the warning announces as little as on what is there today.
    """
    message = r"A saved_tensors_hooks context \(e\.g\. save_on_cpu\) is active"
    warnings.filterwarnings("ignore", message=message, category=FutureWarning)
