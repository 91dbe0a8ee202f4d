"""The CUDA device that a dry run simulates with CPU tensors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tightfit.runtime.internals import (
    autocast_cache_cleared_by,
    foreach_on_cpu,
    installed_release,
    kernels_replaced,
)
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda.allocator import Scratch
from tightfit.tracing.cuda.answers import replace_in_backends, replace_in_torch
from tightfit.tracing.cuda.attention import Capability
from tightfit.tracing.cuda.autocast import AutocastKernels
from tightfit.tracing.cuda.by_card import scratch_by_card
from tightfit.tracing.cuda.composites import composites
from tightfit.tracing.cuda.four_bits import four_bit_scratch
from tightfit.tracing.cuda.launches import TRITON_INSTALLERS
from tightfit.tracing.cuda.products import (
    THREADS_WITH_PRODUCTS,
    Release,
    held_workspaces,
    product_scratch,
)
from tightfit.tracing.cuda.reductions import LaunchLimits
from tightfit.tracing.cuda.replacements import Replacements
from tightfit.tracing.cuda.workspace import cuda_workspace
from tightfit.tracing.shapes import TensorShape

# What packages of others read or call, by the module that owns it.
OTHERS = Replacements({"torch.cuda": replace_in_torch, "torch.backends.cuda": replace_in_backends, **TRITON_INSTALLERS})


@dataclass(frozen=True)
class CudaRole:
    """A CUDA device to simulate: its compute capability, its number of multiprocessors, and the release of PyTorch.

    Releases allocate memory for products in different ways. Name and memory are for code that asks for them.
    """

    capability: Capability
    multiprocessors: int
    release: Release = field(default_factory=installed_release)
    name: str = "simulated CUDA device"
    memory_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that libraries hold of the allocator's memory during the whole step: the workspaces of cuBLAS."""
        return held_workspaces(self.capability, self.release)

    @property
    def held_by_a_thread(self) -> int:
        """Bytes of `held_bytes` that one thread's handle of cuBLAS holds, from its first product on."""
        return self.held_bytes // THREADS_WITH_PRODUCTS

    def workspace(
        self, name: str, inputs: Sequence[TensorShape], outputs: Sequence[TensorShape], arguments: tuple
    ) -> Scratch:
        """Bytes of scratch memory of one operator call, rounded as the allocator rounds them."""
        card = LaunchLimits(self.capability, self.multiprocessors)
        blocks = [
            *product_scratch(name, tuple(inputs), self.capability, self.release),
            *cuda_workspace(name, inputs, outputs, arguments).blocks,
            *scratch_by_card(name, inputs, outputs, arguments, card),
            *four_bit_scratch(name, inputs, arguments, card, self.release),
        ]
        return Scratch.of(blocks)

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """A context in which PyTorch treats CPU tensors like CUDA tensors, in every thread.

        Attention, norms and dropout call CUDA's operators. Autocast uses CUDA's lists. Optimizers use their foreach
        form. Questions about CUDA get this device's answers, and kernels of others are not launched. A dry run must be
        active, because a CPU cannot compute these operators.
        """
        # Kernels of the dispatcher, not a function mode: that would miss what C++ calls from C++ (`cross_entropy`'s
        # softmax, attention inside `MultiheadAttention`).
        autocast = AutocastKernels()
        kernels = [(name, "AutocastCPU", kernel) for name, kernel in autocast.kernels()]
        kernels += composites(self.capability)
        with (
            kernels_replaced(kernels),
            autocast_cache_cleared_by(autocast.clear),
            foreach_on_cpu(),
            OTHERS.active(),
        ):
            simulation.card = self
            try:
                yield
            finally:
                simulation.card = None
