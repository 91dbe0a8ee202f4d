"""What we use of PyTorch that is not its public interface, all in one place: what to look at when a release moves it.

Each is there in torch 2.11 and 2.13.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import _engine_run_backward

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (the stub does not know it)

ENGINE_CODE = _engine_run_backward.__code__  # the frame from which the engine calls operators of its own
NoAutocast = torch._C._DisableAutocast
_COUNTS_WRITES = torch._C.DispatchKey.ADInplaceOrView  # where aliases get their shared version counter
without_dynamo = _disable_dynamo  # loads dynamo when the function is first called, not when it is defined

__all__ = [
    "ENGINE_CODE",
    "NoAutocast",
    "clear_cublas_workspaces",
    "counting_alias",
    "current_node",
    "graph_is_kept",
    "is_dense",
    "newest_sequence_number",
    "set_version_counters",
    "without_dynamo",
]


def clear_cublas_workspaces() -> None:
    """Give back the scratch memory that cuBLAS keeps; only on a build with CUDA."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces")()  # noqa: B009 (builds without CUDA do not have it)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory they span, each once."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def current_node() -> Any:
    """The autograd node whose backward is running, or None."""
    return torch._C._current_autograd_node()


def counting_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, but with its count of in-place writes, also from below autograd."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_WRITES)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, excluded)


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
