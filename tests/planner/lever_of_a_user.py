"""A lever in one file: feed-forwards hold what backward reads in bf16. `lever_in_force()` registers it for a while."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from tightfit.levers.recompute.lever import install
from tightfit.levers.recompute.region import FrugalForward
from tightfit.planner.levers import Exactness, Lever, forget, register

BOUND = 0.01


class HalvedForward(FrugalForward):
    """Runs a module as it is, with what it saves of fp32 activations rounded to bf16."""

    does = "held in bf16"

    def __call__(self, *args, **kwargs):
        with saved_tensors_hooks(halved, torch.Tensor.float):
            return self.original(*args, **kwargs)


def halved(tensor):
    is_activation = tensor.dtype == torch.float32 and not isinstance(tensor, torch.nn.Parameter) and tensor.dim() > 2
    return tensor.to(torch.bfloat16) if is_activation else tensor


@dataclass(frozen=True)
class HalvedModules(Lever):
    """The modules at `paths` hold what they save in bf16."""

    paths: tuple[str, ...]

    name = "halved"
    title = "halved"
    summary = "feed-forwards hold what backward reads in bf16"
    exactness = Exactness.INEXACT
    bound = BOUND
    needs_blocks = True

    @classmethod
    def settings(cls, step):
        return [cls(tuple(f"{block}.mlp" for block in step.blocks))] if step.blocks else []

    def apply(self, model):
        return install(HalvedForward(model.get_submodule(path), path) for path in self.paths)

    def sentence(self, choices):
        return f"{len(self.paths)} feed-forwards hold in bf16 what backward reads."

    @classmethod
    def from_dict(cls, raw):
        return cls(tuple(raw["paths"]))

    def __str__(self):
        return "feed-forwards halved"


@contextmanager
def lever_in_force():
    register(HalvedModules)
    try:
        yield HalvedModules
    finally:
        forget(HalvedModules.name)
