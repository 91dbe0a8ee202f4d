"""Measures the peak of a step from the allocator's own record."""

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.memory.disk import let_go
from tightfit.runtime.internals import recorded_allocations

_ELSEWHERE = "_tightfit_elsewhere"  # of a storage that maps a file
# Kineto, on which the profiler is built, reads this variable on first use. Below this level it writes lines to stderr
# whenever a profile starts or stops. Its highest level is 5 (USDT).
_KINETO_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "6"


def measured_peak(step: Callable[[], Any], resident: Iterable[Tensor]) -> int:
    """Measure the peak of `step()` in bytes, on the device of the `resident` tensors.

    On a CPU it is the bytes of `resident` (the tensors that exist before the step; each storage counts once) plus the
    highest point of the allocator's record above them. On CUDA it is the allocator's own peak. Memory that kernels
    allocate without the allocator (oneDNN's scratch) is not included.

    Garbage is collected before the step, and not during it. Garbage of an earlier run would be freed inside the record,
    and hide as many bytes that the step allocates.
    """
    resident = list(resident)
    device = next((tensor.device for tensor in resident), torch.device("cpu"))
    gc.collect()
    with collector_off():
        if device.type == "cuda":
            return _cuda_peak(step, device)
        return storage_bytes(resident) + cpu_rise(step)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages. Each storage counts once, and those of streamed weights in a file do not."""
    storages = [part.untyped_storage() for tensor in tensors for part in memory_of(tensor)]
    storages = [storage for storage in storages if not storage.__dict__.get(_ELSEWHERE)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def elsewhere(tensor: Tensor) -> Tensor:
    """Note that a tensor's storage is in no memory of the device, and return the tensor."""
    tensor.untyped_storage().__dict__[_ELSEWHERE] = True
    return tensor


def rest(tensor: Tensor) -> None:
    """Take a tensor that maps a file out of this process's memory until it is used again; others stay as they are."""
    storage = tensor.untyped_storage()
    if storage.__dict__.get(_ELSEWHERE):
        let_go(storage.data_ptr(), storage.nbytes())


def memory_of(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's content: the tensor itself, or the codes and scales of a quantised one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a shard of a distributed tensor names its mesh of devices too
            yield from memory_of(part)


def scales_of(parameter: Tensor) -> Iterator[Tensor]:
    """The tensors of a weight quantised by bitsandbytes besides its codes: scales and the table of values.

    In the order in which `QuantState.to` of bitsandbytes moves them.
    """
    state = getattr(parameter, "quant_state", None)
    nested = getattr(state, "state2", None)
    for holder, names in ((state, ("code", "absmax", "offset")), (nested, ("absmax", "code"))):
        found = (getattr(holder, name, None) for name in names)
        yield from (value for value in found if isinstance(value, Tensor))


def _cuda_peak(step: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def cpu_rise(step: Callable[[], Any]) -> int:
    """The highest point of the CPU allocator's record during the step, relative to its start; at least zero."""
    with _silent_kineto():
        # PyTorch 2.11 warns where events of several cycles are not kept. There is one cycle.
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        with profile:
            if profile.profiler is not None:
                profile.profiler.acc_events = False  # or the end would parse every event, which nobody reads here
            step()
    return recorded_rise(profile).highest


class Rise(NamedTuple):
    """Bytes relative to the start of a record: at its highest point, and at its end."""

    highest: int
    left: int


def recorded_rise(profile: torch.profiler.profile) -> Rise:
    """The bytes that the CPU's allocator allocated during an ended profile with `profile_memory`.

    Memory from before the profile is not counted when it is freed: the allocator reports such a free only if an earlier
    profile saw that address given out, and with the bytes that it had then.
    """
    now = highest = 0
    held: dict[int, int] = {}
    for address, nbytes in recorded_allocations(profile):
        if nbytes > 0:
            held[address] = nbytes
            now += nbytes
            highest = max(highest, now)
        else:
            now -= held.pop(address, 0)
    return Rise(highest, now)


@contextmanager
def collector_off() -> Iterator[None]:
    """A context without garbage collection: freed garbage of an earlier run would hide new allocations."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Freezing:
    """Mutable: how many contexts want old objects left alone now, and whether the first of them froze the objects."""

    def __init__(self) -> None:
        self.contexts = 0
        self.is_ours = False
        self.lock = threading.Lock()


_freezing = _Freezing()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """A context in which garbage collections do not visit the objects that exist at its start."""
    # The records of a few dry runs make the collector visit everything. With the imported packages that is a million
    # objects: 0.4 s for every second dry run of an 8B.
    with _freezing.lock:
        # Only the outermost context asks for the count, because counting visits all frozen objects: 0.06 s. Somebody
        # else who froze some will unfreeze them.
        if not _freezing.contexts and gc.get_freeze_count() == 0:
            gc.freeze()
            _freezing.is_ours = True
        _freezing.contexts += 1
    try:
        yield
    finally:
        with _freezing.lock:
            _freezing.contexts -= 1
            if not _freezing.contexts and _freezing.is_ours:
                gc.unfreeze()
                _freezing.is_ours = False


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """A context in which Kineto does not write to the terminal, unless the user chose a level or profiled before."""
    chosen = os.environ.get(_KINETO_LEVEL)
    os.environ.setdefault(_KINETO_LEVEL, _NOTHING)
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[_KINETO_LEVEL]
