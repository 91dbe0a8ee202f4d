"""A CUDA process, played: a benchmark script runs dry, and PyTorch's caching allocator is asked for its peak."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tightfit.memory.allocator import collector_off
from tightfit.runtime.internals import current_node
from tightfit.runtime.simulation import simulation
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.cuda.allocator import MIN_BLOCK
from tightfit.tracing.cuda.products import Release, blas_workspace
from tightfit.tracing.cuda.replay import play
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.record import Phase
from tightfit.tracing.shapes import TensorShape
from tightfit.tracing.step import record

REPEATS = 3  # the first makes the gradients, later ones are alike
RELEASE: Release = (2, 7)  # rows are of 2.4 to 2.11, which all keep cuBLAS's workspaces; no product ran on newer cards
PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot"))


@dataclass(frozen=True)
class Card:
    """What of a graphics card decides bytes."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


CARDS = {
    "a100-40": Card("A100 40GB", (8, 0), 108),
    "a100-80": Card("A100 80GB", (8, 0), 108),
    "rtx3090": Card("RTX 3090", (8, 6), 82),
    "rtx4090": Card("RTX 4090", (8, 9), 128),
    "h100": Card("H100 SXM", (9, 0), 132),
    "h100-pcie": Card("H100 PCIe", (9, 0), 114),
    "b200": Card("B200", (10, 0), 148),
}


class _Process(DryRun):
    """Keeps cuBLAS's workspace for each thread (forward's and autograd's own) from its first product on."""

    def __init__(self, role: CudaRole, handles: int):
        super().__init__(Ledger(rounding=MIN_BLOCK), ModuleTracker(nn.Module()), workspace=role.workspace)
        self.phase = Phase.BACKWARD  # where autograd's engine adds gradients in place, they are taken as such
        self.role = role
        self.workspaces: dict[bool, torch.Tensor] = {}
        for thread in (False, True)[:handles]:
            self._keep(thread)

    def finish(self, traits: Any, *rest: Any) -> None:
        in_backward = current_node() is not None
        if traits.name in PRODUCTS and in_backward not in self.workspaces:
            self._keep(in_backward)
        super().finish(traits, *rest)

    def _keep(self, thread: bool) -> None:
        size = blas_workspace(self.role.capability, self.role.release)
        workspace = self.workspaces[thread] = TensorShape((size,), (1,), torch.uint8).unbacked()
        self.ledger.track(workspace, known=False, operator=self.ledger.now)


def peak_of(script: Callable[[], Callable[[], Any]], card: Card, *, handles: int = 0, above: bool = False) -> int:
    """Bytes of `max_memory_allocated` over the last of several runs; with `above` beyond what was there before it.

    `script` makes the tensors that are there before and returns what is measured. `handles` are the workspaces of
    cuBLAS that the process held before.
    """
    with collector_off():
        role = CudaRole(card.capability, card.multiprocessors, RELEASE)
        dry = _Process(role, handles)
        simulation.is_dry = True
        try:
            with role.simulated(), dry:
                measured = script()
                first = len(dry.operators)
                for _ in range(REPEATS):
                    first = len(dry.operators)
                    measured()
                trace = record(dry, [0, len(dry.operators)], repeats=1)
        finally:
            simulation.is_dry = False
            dry.restore()
            dry.ledger.close()
    before = trace.starts[first] if above else 0
    return max(play(trace, steps=1).levels[first:]) - before
