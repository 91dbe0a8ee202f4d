"""What a dry run has to be told in order to play a CUDA device with CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tightfit.activity import now
from tightfit.internals import autocast_cache_cleared_by, foreach_on_cpu, kernels_replaced
from tightfit.trace.cuda.attention import Capability
from tightfit.trace.cuda.autocast import AutocastKernels
from tightfit.trace.cuda.composites import composites
from tightfit.trace.cuda.workspace import THREADS_WITH_PRODUCTS, blas_workspace


@dataclass(frozen=True)
class CudaRole:
    """A CUDA device to be played: its compute capability and its number of multiprocessors.

    A model that asks a tensor for its device is told "cpu", since that is where the tensor lies.
    """

    capability: Capability
    multiprocessors: int

    @property
    def held_bytes(self) -> int:
        """What libraries keep for good of the allocator's memory: the workspaces of cuBLAS."""
        return THREADS_WITH_PRODUCTS * blas_workspace(self.capability)

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Inside, CPU tensors are treated as CUDA treats its own, in every thread: attention, norms and dropout by
        CUDA's kernels, autocast by CUDA's lists, optimizers in their foreach form. What is called is not computed: a
        dry run has to be active.
        """
        autocast = AutocastKernels()
        kernels = [(name, "AutocastCPU", kernel) for name, kernel in autocast.kernels()]
        kernels += composites(self.capability)
        with kernels_replaced(kernels), autocast_cache_cleared_by(autocast.clear), foreach_on_cpu():
            now.playing_cuda = True
            try:
                yield
            finally:
                now.playing_cuda = False
