"""The dispatcher: modes on its stack, and kernels of operators."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

NoAutocast = torch._C._DisableAutocast
without_function_modes = torch._C.DisableTorchFunction  # a context
# Keys that are excluded in operators called by a dispatch mode: autograd's, and those on which `torch.vmap` depends.
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
fallthrough = torch.library.fallthrough_kernel  # as a kernel of a key: continue with the next key


@contextmanager
def no_modes() -> Iterator[None]:
    """A context without active dispatch modes."""
    with _disable_current_modes():
        yield


def dispatch_is_watched() -> bool:
    """True if a dispatch mode is active in this thread."""
    return dispatch_modes() > 0


def dispatch_modes() -> int:
    """The number of dispatch modes that are active in this thread."""
    return torch._C._len_torch_dispatch_stack()


_dtype, _deterministic, _mkldnn, _precision, _threads = (
    torch.get_default_dtype,
    torch._C._get_deterministic_algorithms,
    torch._C._get_mkldnn_enabled,
    torch._C._get_float32_matmul_precision,
    torch.get_num_threads,
)


def function_switches(*, convolves: bool = True, calls: bool = True) -> tuple:
    """The process's settings on which depends what PyTorch computes, down to the last bit.

    Which operators a function calls (`calls`), and which kernels these run. Read for each operator of an observed
    block, which has no need of `calls`, nor of what only convolutions and recurrent layers read (`convolves`).
    """
    try:
        precision: Any = _precision()
    except RuntimeError:  # the user has set it for each backend
        precision = tuple(_precision_of(*each) for each in _PRODUCTS)
    here = (
        _dtype(),
        _deterministic(),
        _mkldnn(),
        attention_kernels() if calls else None,
        precision,
        tuple(_precision_of(*each) for each in _CONVOLUTIONS) if convolves else None,
        _threads(),
    )
    return (*here, *_of_cards()) if _HAS_CARDS else here


_precision_of = torch._C._get_fp32_precision_getter
_PRODUCTS = (("mkldnn", "matmul"), ("cuda", "matmul"))
_CONVOLUTIONS = (("mkldnn", "conv"), ("mkldnn", "rnn"), ("cuda", "conv"), ("cuda", "rnn"))
_HAS_CARDS = torch.backends.cuda.is_built()
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


def attention_kernels() -> tuple:
    """The kernels that `scaled_dot_product_attention` may choose, and the order in which it asks them."""
    allowed = tuple(getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _ATTENTION)
    return (*allowed, tuple(torch._C._get_sdp_priority_order()))


def _set_attention(kernels: tuple) -> None:
    *allowed, order = kernels
    for name, is_allowed in zip(_ATTENTION, allowed, strict=True):
        getattr(torch._C, f"_set_sdp_use_{name}")(is_allowed)
    torch._C._set_sdp_priority_order(list(order))


def _of_cards() -> tuple:
    return (
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
    )


def _set_precision(precision: Any) -> None:
    if isinstance(precision, str):
        torch._C._set_float32_matmul_precision(precision)
    else:
        _set_precisions(_PRODUCTS, precision)


def _set_precisions(places: Iterable[tuple[str, str]], precisions: Iterable[str]) -> None:
    for (backend, operator), each in zip(places, precisions, strict=True):
        torch._C._set_fp32_precision_setter(backend, operator, each)


def _set_deterministic(mode: bool) -> None:
    torch._C._set_deterministic_algorithms(mode, warn_only=torch._C._get_deterministic_algorithms_warn_only())


_SETTERS: tuple[Callable[[Any], Any], ...] = (  # in the order of `function_switches`
    torch.set_default_dtype,
    _set_deterministic,
    torch._C._set_mkldnn_enabled,
    _set_attention,
    _set_precision,
    functools.partial(_set_precisions, _CONVOLUTIONS),
    torch.set_num_threads,
    torch._C._set_cudnn_enabled,
    torch._C._set_cudnn_benchmark,
    torch._C._set_cudnn_deterministic,
    lambda allowed: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*allowed),
    lambda allowed: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*allowed),
    torch._C._set_cublas_allow_fp16_accumulation,
)


def operator_switches() -> tuple:
    """The first of `function_switches`, on which depends which operators a function calls."""
    return _dtype(), _deterministic(), _mkldnn(), attention_kernels()


@contextmanager
def switched_as(switches: tuple) -> Iterator[None]:
    """A context with these settings, as `function_switches` returned them."""
    changed = [
        (setter, before, now)
        for setter, before, now in zip(_SETTERS, switches, function_switches(), strict=False)
        if before not in (now, None)
    ]
    for setter, before, _ in changed:
        setter(before)
    try:
        yield
    finally:
        for setter, _, now in changed:
            setter(now)


def nothing_is_watched() -> bool:
    """True if neither a dispatch mode nor a function mode is active in this thread."""
    return not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack()


def is_active(mode: TorchDispatchMode) -> bool:
    """True if a dispatch mode is active in this thread, innermost or not."""
    depth = torch._C._len_torch_dispatch_stack()
    return any(torch._C._get_dispatch_stack_at(place) is mode for place in range(depth))


def is_innermost(mode: TorchDispatchMode) -> bool:
    """True if a dispatch mode is the one entered last in this thread."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode


def active_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, the one entered last first."""
    depth = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(place) for place in reversed(range(depth))]


@contextmanager
def as_outside_of_kernels() -> Iterator[None]:
    """A context for an operator's own kernel in which autograd and `torch.vmap` work, even under a dispatch mode."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _ABOVE_KERNELS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield


def has_kernel(operator: str, key: str) -> bool:
    """True if this release has an operator (`"aten::mm"`) with its own kernel for a dispatch key."""
    known = torch._C._dispatch_has_kernel(operator)  # for an unknown operator, the question about a key raises
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def runs_with(operator: str, key: str) -> bool:
    """True if an operator has a kernel for a dispatch key, its own or one for several keys."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator, key)


def is_custom_operator(operator: str) -> bool:
    """True if a Python function was made an operator by `torch.library.custom_op` or `triton_op`."""
    registry = sys.modules.get("torch._library.custom_ops")
    return registry is not None and operator in registry.OPDEFS


def operators_with_kernel(key: str) -> list[str]:
    """The names of the operators with their own kernel for a dispatch key."""
    return _with_kernel(key, tuple(torch._C._dispatch_get_all_op_names()))


def run_composite(operator: Any, args: tuple, kwargs: dict) -> Any:
    """Run a composite operator's own kernel, past all modes. The operators that it calls come to the modes again.

    Autograd's kernels decompose these operators. Where autograd is switched off, they reach the modes as they are: in
    `torch.inference_mode`, and inside of a tensor's own `__torch_dispatch__`.
    """
    found = next((leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    device = "cpu" if found is None else found.device.type
    key = torch._C._dispatch_key_parse(f"Autograd{torch._C._dispatch_key_for_device(device)}")
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@functools.lru_cache(maxsize=4)
def _with_kernel(key: str, names: tuple[str, ...]) -> list[str]:
    """Those of all operators' `names`, which change when a library is loaded or goes."""
    return [name for name in names if has_kernel(name, key)]


@contextmanager
def kernels_replaced(kernels: Iterable[tuple[str, str, Callable[..., Any]]]) -> Iterator[None]:
    """A context in which operators have these kernels: name (`"aten::pow.Scalar"`), dispatch key, function."""
    libraries: dict[str, torch.library.Library] = {}
    kernels = list(kernels)
    _forget_dispatch(kernels)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # replacing is intended
            for qualified, key, kernel in kernels:
                namespace, _, name = qualified.partition("::")
                if namespace not in libraries:
                    libraries[namespace] = torch.library.Library(namespace, "IMPL")
                libraries[namespace].impl(name, kernel, key, allow_override=True)  # of a Python kernel too
        yield
    finally:
        for library in libraries.values():
            library._destroy()
        _forget_dispatch(kernels)


def _forget_dispatch(kernels: Iterable[tuple[str, str, Callable[..., Any]]]) -> None:
    """Let PyTorch's Python dispatcher look these operators up again: it keeps which key of theirs has a kernel.

    A composite operator with a kernel for one device is none for autograd. Compiled code that was recorded afterwards
    would have no gradient for it.
    """
    for qualified, _, _ in kernels:
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        found: Any = torch.ops
        for part in (namespace, base, overload or "default"):
            found = vars(found).get(part)  # an attribute would be made, and fails where none is defined
            if found is None:
                break
        else:
            found._dispatch_cache.clear()


def processor_has_amx() -> bool:
    """True if the processor multiplies tiles of 16-bit numbers, for which oneDNN packs operands otherwise."""
    return torch.cpu._is_amx_tile_supported()
