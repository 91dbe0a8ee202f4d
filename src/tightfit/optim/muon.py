"""Muon on matrices, AdamW on everything else, as one optimizer; and the same with states in 8 bits."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from tightfit.optim.base import FrugalOptimizer, Shared
from tightfit.optim.companding import joined, signed_decoded, signed_encoded, threshold_of
from tightfit.optim.flash import (
    ERROR,
    SCALES,
    FlashAdamW,
    Piece,
    check_parameters,
    in_memory_order,
    pieces,
    scales_shape,
    write_split,
)
from tightfit.runtime.internals import orthogonalised
from tightfit.runtime.simulation import repeated

ALGORITHM = "algorithm"
MOMENTUM, SCALE = "momentum_buffer", "momentum_scale"


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
            part = self._of_matrices(owned) if algorithm == "muon" else self._of_the_rest(owned)
            part.state = defaultdict(dict)
            self._parts[algorithm] = part
        part = self._parts[algorithm]
        for group in self.param_groups:
            if group[ALGORITHM] == algorithm:
                for key, value in part.defaults.items():
                    group.setdefault(key, value)
        return part

    def _of_matrices(self, owned: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Muon(owned, momentum=self.momentum, adjust_lr_fn="match_rms_adamw")

    def _of_the_rest(self, owned: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(owned)


class Muon8bit(MuonWithAdamW):
    """`MuonWithAdamW` with its states in 8 bits, and for bf16 weights 8 more bits of each: 24-bit masters.

    Momentum of a matrix takes 1.06 bytes a number: a code of 8 bits, and an fp32 scale for each 64. The other
    parameters step as in `FlashAdamW`. Momentum is decoded a chunk at a time; the update of one matrix exists in bf16,
    in which Muon orthogonalises it.

    Args:
        params: Parameters or groups, as for `MuonWithAdamW`, like `lr`, `momentum`, `betas`, `eps` and `weight_decay`.

    Raises:
        InputError: As `FlashAdamW`.

    Example:
        >>> import torch
        >>> from tightfit.optim import Muon8bit
        >>> model = torch.nn.Linear(64, 64, bias=False)
        >>> optimizer = Muon8bit(model.parameters(), lr=1e-2)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["momentum_buffer"].dtype
        torch.int8
    """

    def adopt(self, parameters: Sequence[Tensor], choice: Any = None) -> None:
        check_parameters("Muon8bit", parameters)

    def state_shape(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        return scales_shape(parameter) if key in (SCALE, *SCALES) else super().state_shape(parameter, key)

    def _of_matrices(self, owned: list[Tensor]) -> torch.optim.Optimizer:
        part = _MatricesIn8Bits(owned)
        part.defaults = super()._of_matrices(owned).defaults
        return part

    def _of_the_rest(self, owned: list[Tensor]) -> torch.optim.Optimizer:
        return FlashAdamW(owned)


class _MatricesIn8Bits(FlashAdamW):
    """Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") as `torch.optim.Muon`
    computes it, with its momentum in 8 bits.
    """

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one matrix (m x n) of fp32 or bf16. The momentum is written last, and decoded twice for that: a step
        that runs out of memory before can be finished.
        """
        state, momentum = self.state[parameter], group["momentum"]
        if MOMENTUM not in state:
            state.update(_new_state(parameter))
        state["step"] += 1
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        direction = orthogonalised(_look_ahead(parameter, gradient, state, momentum), group)
        _move(parameter, direction, state, group)
        del direction
        for piece, times in pieces(parameter):
            with repeated(times):
                _remember(piece, gradient, state, momentum)


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    codes = (MOMENTUM, ERROR) if parameter.dtype == torch.bfloat16 else (MOMENTUM,)
    return {
        "step": torch.tensor(0.0, dtype=torch.float32),
        **{key: torch.zeros_like(parameter, dtype=torch.int8) for key in codes},
        SCALE: parameter.new_zeros(scales_shape(parameter), dtype=torch.float32),
    }


def _momentum(piece: Piece, gradient: Tensor, state: dict[str, Any], momentum: float) -> Tensor:
    """The new momentum of a piece, in rows of fp32."""
    before = signed_decoded(piece.rows(in_memory_order(state[MOMENTUM])), piece.scales(state[SCALE]))
    return before.lerp_(piece.rows(in_memory_order(gradient)).float(), 1 - momentum)


def _remember(piece: Piece, gradient: Tensor, state: dict[str, Any], momentum: float) -> None:
    codes, scale = signed_encoded(_momentum(piece, gradient, state, momentum))
    piece.rows(in_memory_order(state[MOMENTUM])).copy_(codes)
    piece.scales(state[SCALE]).copy_(scale)


def _look_ahead(parameter: Tensor, gradient: Tensor, state: dict[str, Any], momentum: float) -> Tensor:
    """Nesterov's update of a matrix (m x n), in bf16."""
    update = torch.empty_like(parameter, dtype=torch.bfloat16)
    for piece, times in pieces(parameter):
        with repeated(times):
            piece.rows(in_memory_order(update)).copy_(
                piece.rows(in_memory_order(gradient))
                .float()
                .lerp(_momentum(piece, gradient, state, momentum), momentum)
            )
    return update


def _move(parameter: Tensor, direction: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Decay a matrix, and move it in a direction (m x n, bf16), by as much as AdamW would: `match_rms_adamw` of
    `torch.optim.Muon`.
    """
    rate = float(group["lr"])
    decay, size = 1 - rate * group["weight_decay"], rate * 0.2 * max(parameter.shape) ** 0.5
    if ERROR not in state:
        parameter.mul_(decay).add_(direction, alpha=-size)
        return
    weight, error = in_memory_order(parameter), in_memory_order(state[ERROR])
    direction = in_memory_order(torch.empty_like(parameter).copy_(direction))
    for piece, times in pieces(parameter):
        with repeated(times):
            new = joined(piece.rows(weight), piece.rows(error)).mul_(decay)
            new.add_(piece.rows(direction), alpha=-size)
            write_split(piece, new, weight, error, threshold_of(int(state["step"])))
            del new


def _split(members: list[Any]) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for member in members:
        parameter = member[1] if isinstance(member, tuple) else member
        parts["muon" if parameter.dim() == 2 else "adamw"].append(member)
    return {algorithm: part for algorithm, part in parts.items() if part}
