"""The ways to recompute that every trap is tried with, and PyTorch's own for comparison."""

import functools
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tightfit.levers.handle import Applied
from tightfit.levers.recompute import KEEP_ALL, Decision, OperatorKey, Policy, recompute
from tightfit.levers.recompute.lever import apply_policies, matching_modules

aten = torch.ops.aten
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")


@dataclass(frozen=True)
class RandomPolicy(Policy):
    """Keeps about half of the operators of a block, another half for each seed."""

    seed: int = 0

    def decide(self, key: OperatorKey) -> Decision:
        drawn = zlib.crc32(f"{self.seed} {key.name} {key.occurrence}".encode()) % 2
        return Decision.KEEP if drawn else Decision.RECOMPUTE


@dataclass(frozen=True)
class ProductsKept(Policy):
    """Keeps every matrix product and convolution."""

    def decide(self, key: OperatorKey) -> Decision:
        return Decision.KEEP if key.name in PRODUCTS else Decision.RECOMPUTE


def whole(model: nn.Module) -> Applied:
    return recompute(model, "layers.*")


def two_segments(model: nn.Module) -> Applied:
    return recompute(model, "layers.*", segments=2)


def one_segment(model: nn.Module) -> Applied:
    return recompute(model, "layers.*", segments=1)


def with_policy(policy: Policy, model: nn.Module) -> Applied:
    return apply_policies(model, dict.fromkeys(matching_modules(model, "layers.*"), policy))


def whole_and_parts(model: nn.Module) -> Applied:
    """Blocks and, inside each, its children: one watched region within another."""
    inner = [path for path, _ in model.named_modules() if path.startswith("layers.") and path.count(".") == 2]
    parts = apply_policies(model, {path: RandomPolicy(seed=9) for path in inner})
    return Applied([parts, recompute(model, "layers.*")])


LEVERS = {
    "whole blocks": whole,
    "two segments": two_segments,
    "one segment": one_segment,
    "products kept": functools.partial(with_policy, ProductsKept()),
    "everything kept": functools.partial(with_policy, KEEP_ALL),
    "random half 1": functools.partial(with_policy, RandomPolicy(seed=1)),
    "random half 2": functools.partial(with_policy, RandomPolicy(seed=2)),
    "random half 3": functools.partial(with_policy, RandomPolicy(seed=3)),
    "parts within blocks": whole_and_parts,
}


class Checkpointed:
    """PyTorch's checkpoint around every block of a model."""

    def __init__(self, model: nn.Module, **options: Any):
        self.blocks = [model.get_submodule(path) for path in matching_modules(model, "layers.*")]
        for block in self.blocks:
            block.__dict__["forward"] = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)

    def __enter__(self) -> "Checkpointed":
        return self

    def __exit__(self, *exception: Any) -> None:
        for block in self.blocks:
            del block.__dict__["forward"]


def products_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(operator) in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


TORCH_LEVERS = {
    "torch checkpoint": Checkpointed,
    "torch selective checkpoint": functools.partial(
        Checkpointed, context_fn=functools.partial(create_selective_checkpoint_contexts, products_policy)
    ),
}
