"""What a dry run has to be told in order to play a CUDA device with CPU tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tightfit.runtime.activity import now
from tightfit.runtime.internals import autocast_cache_cleared_by, foreach_on_cpu, kernels_replaced
from tightfit.tracing.cuda.allocator import round_size
from tightfit.tracing.cuda.attention import Capability
from tightfit.tracing.cuda.autocast import AutocastKernels
from tightfit.tracing.cuda.by_card import scratch_by_card
from tightfit.tracing.cuda.composites import composites
from tightfit.tracing.cuda.products import Release, held_workspaces, installed_release, product_scratch
from tightfit.tracing.cuda.reductions import Card
from tightfit.tracing.cuda.workspace import cuda_workspace
from tightfit.tracing.shapes import TensorShape


@dataclass(frozen=True)
class CudaRole:
    """A CUDA device to be played: its compute capability, its number of multiprocessors, and the release of PyTorch
    that runs on it, since releases take memory for products in different ways.

    A model that asks a tensor for its device is told "cpu", since that is where the tensor lies.
    """

    capability: Capability
    multiprocessors: int
    release: Release = field(default_factory=installed_release)

    @property
    def held_bytes(self) -> int:
        """What libraries keep for good of the allocator's memory: the workspaces of cuBLAS."""
        return held_workspaces(self.capability, self.release)

    def workspace(
        self, name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple
    ) -> int:
        """Bytes of scratch memory of one operator call, as the allocator hands them out."""
        sizes = product_scratch(name, tuple(inputs), self.capability, self.release)
        sizes += scratch_by_card(name, inputs, outputs, arguments, Card(self.capability, self.multiprocessors))
        return cuda_workspace(name, inputs, outputs, arguments) + sum(map(round_size, sizes))

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
