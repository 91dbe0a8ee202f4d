"""Muon on matrices, AdamW on everything else, as one optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Unpack

import torch

from tightfit.optim.base import FrugalOptimizer, Shared

ALGORITHM = "algorithm"


class MuonWithAdamW(FrugalOptimizer):
    """`torch.optim.Muon` for parameters with two dimensions, `torch.optim.AdamW` for the others.

    Each group is split into at most two, with the key `algorithm` (`muon` or `adamw`). Muon's updates are scaled to the
    size of AdamW's (`match_rms_adamw`; Liu et al. 2025, "Muon is scalable for LLM training"), so both use one learning
    rate.

    Args:
        params: Parameters or groups. A group that has the key `algorithm` is not split: `{"params": [embedding],
            "algorithm": "adamw"}`.
        lr: The learning rate of both.
        momentum: Muon's.
        **shared: Further settings of both.

    Example:
        >>> import torch
        >>> from tightfit.optim import MuonWithAdamW
        >>> optimizer = MuonWithAdamW(torch.nn.Linear(8, 8).parameters(), lr=1e-3)
        >>> [group["algorithm"] for group in optimizer.param_groups]
        ['muon', 'adamw']
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        **shared: Unpack[Shared],
    ):
        self.prepare(momentum=momentum)
        super().__init__(params, lr, **shared)

    def prepare(self, *, momentum: float) -> None:
        self.momentum = momentum
        self._parts: dict[str, torch.optim.Optimizer] = {}

    def own_settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if ALGORITHM in param_group:
            super().add_param_group(param_group)
            return
        members = param_group["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        for algorithm, part in _split(members).items():
            super().add_param_group({**param_group, "params": part, ALGORITHM: algorithm})

    def update(self) -> None:
        for algorithm in ("muon", "adamw"):
            groups = [group for group in self.param_groups if group[ALGORITHM] == algorithm]
            if groups:
                part = self._part(algorithm)
                part.param_groups, part.state = groups, self.state
                part.step()

    def _part(self, algorithm: str) -> torch.optim.Optimizer:
        """The optimizer that steps the groups of an algorithm. It shares its groups and states with this one."""
        if algorithm not in self._parts:
            owned = [p for g in self.param_groups if g[ALGORITHM] == algorithm for p in g["params"]]
            if algorithm == "adamw":
                part: torch.optim.Optimizer = torch.optim.AdamW(owned)
            else:
                part = torch.optim.Muon(owned, momentum=self.momentum, adjust_lr_fn="match_rms_adamw")
            part.state = defaultdict(dict)
            self._parts[algorithm] = part
        part = self._parts[algorithm]
        for group in self.param_groups:
            if group[ALGORITHM] == algorithm:
                for key, value in part.defaults.items():
                    group.setdefault(key, value)
        return part


def _split(members: list[Any]) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for member in members:
        parameter = member[1] if isinstance(member, tuple) else member
        parts["muon" if parameter.dim() == 2 else "adamw"].append(member)
    return {algorithm: part for algorithm, part in parts.items() if part}
