"""Autograd's engine and graph: running nodes, version counters, storages and saved-tensor hooks."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward

from tightfit.runtime.internals.dispatcher import no_modes

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (the stub does not know it)

ENGINE_CODE = _engine_run_backward.__code__  # the frame from which the engine calls its own operators
_COUNTS_WRITES = torch._C.DispatchKey.ADInplaceOrView  # the key that gives aliases their shared version counter


def current_node() -> Any:
    """The autograd node whose backward is running, or None."""
    return torch._C._current_autograd_node()


def backward_is_running() -> bool:
    """True if this thread is inside a backward."""
    return torch._C._current_graph_task_id() != -1


def innermost_saved_tensor_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The saved-tensor hooks that autograd calls now, to save and to load; None if there are none."""
    return _autograd._top_saved_tensors_default_hooks(False)


def checkpoint_is_around() -> bool:
    """True if what runs now is a forward that PyTorch's checkpoint will run again (not the reentrant one's)."""
    hooks = innermost_saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` when the running backward has ended. Only inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def transforms_are_active() -> bool:
    """True if a transform of `torch.func` (`grad`, `vmap`, `jvp`, ...) runs in this thread."""
    return torch._C._are_functorch_transforms_active()


def dual_numbers_are_active() -> bool:
    """True if tensors of this thread may have tangents (`torch.autograd.forward_ad`)."""
    return forward_ad._current_level >= 0


def autocast_is_active() -> bool:
    """True if autocast is active for any kind of device."""
    return torch._C._is_any_autocast_enabled()


def is_profiling() -> bool:
    """True if a profiler of PyTorch runs. Only one can run at a time."""
    return _autograd._profiler_enabled()


def is_shared(tensor: torch.Tensor) -> bool:
    """True if anything except this tensor holds its storage: another tensor, a graph, a view."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor itself, and the storage's Python object


def counting_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, but with the same count of in-place writes."""
    # Inside a dispatch handler, autograd's keys are excluded, and `detach` would give the alias a counter of its own.
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_WRITES)
    if not excluded:
        return tensor.detach()
    torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_WRITES, True)


def graph_is_kept() -> bool:
    """True if the running backward keeps saved tensors for another one (`retain_graph=True`)."""
    # If a release drops this function, answer True: a gradient is then copied once more than necessary.
    asked = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else asked()


def newest_sequence_number() -> int:
    """The sequence number of this thread's newest node."""
    return _autograd._get_sequence_nr() - 1


def forget_interrupted_backward() -> None:
    """Let go of what a backward that ended in an error has left in this thread: nodes that waited, and what they saved.

    The engine drops them when it finds them in its queue, which is in the next backward on a CPU (`thread_main` in
    torch/csrc/autograd/engine.cpp). At the end of a thread, PyTorch 2.15 drops them too late, and crashes.
    """
    with no_modes(), torch.inference_mode(False), torch.enable_grad():  # whoever counts operators counts the step's
        torch.zeros((), device="cpu", requires_grad=True).backward()


def set_version_counters(tensors: Iterable[torch.Tensor], versions: Iterable[int]) -> None:
    """Set the in-place counters of tensors."""
    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """A context in which `torch.inference_mode` does what `torch.no_grad` does, also if it is active already."""
    # In inference mode a dispatch mode sees composite operators whole (`reshape`, `linear`), without the parts that
    # allocate, and kernels that are registered for autograd's keys are left out. The allocations are the same.
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def without_gradients(self: Any) -> None:
        self._inference_mode_context = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)
        self._inference_mode_context.__enter__()

    def back(self: Any, *exception: Any) -> None:
        self._inference_mode_context.__exit__(*exception)

    is_active = torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled() and not is_active):
        kind.__enter__, kind.__exit__ = without_gradients, back
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = enter, leave


def ignore_hooks_around_selective_checkpoints() -> None:
    """Suppress PyTorch 2.15's warning about saved-tensor hooks around the model's own selective checkpoints."""
    # The hooks are our executor's. It depends neither on the present behaviour nor on the announced one.
    message = r"A saved_tensors_hooks context \(e\.g\. save_on_cpu\) is active"
    warnings.filterwarnings("ignore", message=message, category=FutureWarning)
