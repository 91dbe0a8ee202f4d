"""The functions of the package `flash_attn` in a dry run.

They are for models of `transformers`, where the package is not installed: it cannot be built without CUDA. PyTorch
contains the same kernels, as operators of its own, with the same saved tensors and the same scratch memory. So
`attn_implementation="flash_attention_2"` runs dry with PyTorch's operators, and the estimate says so. A package that
can be imported is used itself: its operators have fake kernels.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tightfit.errors import TraceError
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda.attention import AttentionCall, flash
from tightfit.tracing.cuda.flex import replace_flex_attention
from tightfit.tracing.cuda.replacements import Replacements
from tightfit.tracing.dry_run import FLEX, running

aten = torch.ops.aten
_NAME = "flash_attention_2"
_UTILITIES = "transformers.modeling_flash_attention_utils"
_MODELS = "transformers.modeling_utils"
# What `lazy_import_flash_attention` keeps for the whole process.
_KEPT = (
    "_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn",
    "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn",
)  # fmt: skip


def _functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's own functions if it can be imported, else the stand-ins."""
    try:
        import flash_attn  # pyright: ignore[reportMissingImports]
    except ImportError:
        return flash_attn_func, flash_attn_varlen_func
    return flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention of q (B, T, H, D) to k and v (B, S, Hkv, D)."""
    _note(q)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return flash(AttentionCall(query, key, value, None, dropout_p, causal, True), softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention within sequences that are joined to one: q (T, H, D), k and v (S, Hkv, D), and where each begins."""
    _note(q)
    width = q.shape[-1]
    scale = 1 / math.sqrt(width) if softmax_scale is None else softmax_scale
    missing = -width % 8  # as in `flash_attn_interface.py`
    q, k, v = (pad(t, (0, missing)) if missing else t for t in (q, k, v))
    longest = int(max_seqlen_q), int(max_seqlen_k)
    out = aten._flash_attention_forward.default(
        q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, causal, False, scale=scale
    )[0]
    return out[..., :width] if missing else out


def _note(query: Tensor) -> None:
    dry = running()
    if dry is None:
        return
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise TraceError(
            f"{_NAME} takes float16 and bfloat16, and got {str(query.dtype).removeprefix('torch.')} in "
            f"{dry.modules.current or 'the step'}: use precision bf16, or another attn_implementation"
        )
    dry.questions.note("the package flash_attn, which is not installed,", "to run PyTorch's flash attention")


def _replace_lookup(module: ModuleType, replacements: Replacements) -> None:
    """Let a model of `transformers` find these functions in a dry run."""
    if module.is_flash_attn_2_available():
        return  # `transformers` loads the package itself
    find = module._lazy_imports

    def found(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Callable[..., Any] | None, ...]:
        if implementation != _NAME or not simulation.is_dry:
            return find(implementation, *args, **kwargs)
        if not simulation.of_cuda:
            raise TraceError(f"{_NAME} needs a CUDA device: name one (device), or use another attn_implementation")
        return *_functions(), None, module._pad_input, module._unpad_input

    replacements.replace(module, "_lazy_imports", found)
    for name in _KEPT:
        if hasattr(module, name):
            replacements.replace(module, name, None)  # and put back afterwards, whatever the step set


# In every dry run: one for a CPU refuses in one line.
ATTENTION_OF_OTHERS = {_UTILITIES: _replace_lookup, FLEX: replace_flex_attention}


# Building such a model


def _replace_checks(module: ModuleType, replacements: Replacements) -> None:
    check, has_hub, preload = (
        module.PreTrainedModel._flash_attn_import_error,
        module.is_kernels_available,
        module.lazy_import_flash_attention,
    )

    def import_error(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _builds.depth or kwargs.get("flash_attn_version", args[0] if args else None) != 2:
            check(self, *args, **kwargs)

    def is_kernels_available(*args: Any, **kwargs: Any) -> bool:
        return not _builds.depth and has_hub(*args, **kwargs)  # it would fetch the kernels from the hub

    def lazy_import_flash_attention(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if _builds.depth and implementation == _NAME else preload(implementation, *args, **kwargs)

    replacements.replace(module.PreTrainedModel, "_flash_attn_import_error", import_error)
    replacements.replace(module, "is_kernels_available", is_kernels_available)
    replacements.replace(module, "lazy_import_flash_attention", lazy_import_flash_attention)


class _Builds(threading.local):
    """Builds of models without memory in this thread."""

    depth: int = 0


_builds = _Builds()
_BUILDING = Replacements({_MODELS: _replace_checks})


@contextmanager
def flash_models_allowed() -> Iterator[None]:
    """A context in which a model of `transformers` can be built for `flash_attn` without the package."""
    _builds.depth += 1
    try:
        with _BUILDING.active():
            yield
    finally:
        _builds.depth -= 1
