"""AdamW for bf16 weights without lost updates: by stochastic rounding, or with the 16 bits that bf16 drops."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tightfit.errors import InputError
from tightfit.optim.adamw_step import MOMENTS, adamw_step, new_moments
from tightfit.optim.base import FrugalOptimizer

Keeping = Literal["remainder", "stochastic"]
REMAINDER = "remainder"
_HALF, _BITS = 1 << 15, 16
_LAST_NAN = 0x7FFF7FFF  # the largest bits that rounding does not carry into the sign
_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: neighbouring counts give distant seeds (splitmix64)


class BF16AdamW(FrugalOptimizer):
    """AdamW in fp32 arithmetic on bf16 weights, with fp32 moments. fp32 parameters are updated as usual.

    Args:
        params: Parameters or groups, as for `torch.optim.AdamW`, like `lr`, `betas`, `eps` and `weight_decay`.
        keeping: `"remainder"` keeps the lower 16 bits of an fp32 master beside the weight, which has the upper 16 bits
            (rounded to nearest). It is bit-equal to AdamW on fp32 weights with the same gradients, and costs 2 bytes
            for each parameter. `"stochastic"` keeps nothing. It rounds the new weight up or down at random, so that its
            mean is right (Zamirai et al. 2020, "Revisiting BFloat16 training").
        seed: The seed of the random rounding, which depends on seed, parameter and step, not on PyTorch's generator.

    Raises:
        InputError: A setting is out of range, or a parameter is fp16.

    Example:
        >>> import torch
        >>> from tightfit.optim import BF16AdamW
        >>> model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        >>> optimizer = BF16AdamW(model.parameters(), lr=1e-2)
        >>> before = model.weight.clone()
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> torch.equal(model.weight, before)
        False
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        keeping: Keeping = "remainder",
        seed: int = 0,
    ):
        self.prepare(keeping=keeping, seed=seed)
        super().__init__(params, lr, betas, eps, weight_decay)

    def prepare(self, *, keeping: Keeping, seed: int) -> None:
        if keeping not in get_args(Keeping):
            raise InputError(f"keeping is {keeping!r}: choose one of {', '.join(get_args(Keeping))}")
        self.keeping: Keeping = keeping
        self.seed = seed
        self._numbers: dict[Tensor, int] = {}

    def own_settings(self) -> dict[str, Any]:
        return {"keeping": self.keeping, "seed": self.seed}

    def adopt(self, parameters: Sequence[Tensor], choice: Any = None) -> None:
        for parameter in parameters:
            if parameter.dtype == torch.float16:
                raise InputError("BF16AdamW: a parameter is fp16, whose range is too small for this: use bf16 or fp32")
            self._numbers[parameter] = len(self._numbers)

    def update(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if parameter.dtype != torch.bfloat16:
            if not state:
                state.update(new_moments(parameter))
            adamw_step([parameter], [gradient], [state], group)
            return
        if MOMENTS[0] not in state:
            zeros = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
            state.update(new_moments(zeros))
            if self.keeping == "remainder":
                state[REMAINDER] = torch.zeros_like(parameter, dtype=torch.int16)
        weight = joined(parameter, state[REMAINDER]) if REMAINDER in state else parameter.float()
        adamw_step([weight], [gradient.float()], [state], group)
        if REMAINDER in state:
            split_into(weight, parameter, state[REMAINDER])
        else:
            parameter.copy_(rounded_stochastically(weight, self._chance(parameter, state)))

    def _chance(self, parameter: Tensor, state: dict[str, Any]) -> torch.Generator:
        # Not from PyTorch's generator: dropout would then draw other numbers than with AdamW.
        count = int(state["step"]) * len(self._numbers) + self._numbers[parameter]
        generator = torch.Generator(parameter.device)
        generator.manual_seed((self.seed + count * _STRIDE) % 2**63)
        return generator


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 numbers whose upper bits are in a bf16 weight and whose lower bits are in an int16 remainder."""
    return (weight.view(torch.int16).to(torch.int32).mul_(1 << _BITS).add_(remainder)).view(torch.float32)


def split_into(number: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write fp32 numbers as the nearest bf16 (halves away from zero) and an int16 remainder in the last bits."""
    # Halves away from zero: the remainder is then from -2^15 to 2^15 - 1, which fits 16 bits.
    bits = number.view(torch.int32)
    # A card's NaN has all bits set, and rounded up it would become a zero.
    upper = bits.clamp_max(_LAST_NAN).add_(_HALF).bitwise_right_shift_(_BITS)
    weight.view(torch.int16).copy_(upper)
    remainder.copy_(bits - upper.mul_(1 << _BITS))


def rounded_stochastically(number: Tensor, generator: torch.Generator) -> Tensor:
    """Round fp32 numbers to one of their two bf16 neighbours, the nearer one more often. Returns bf16."""
    noise = torch.randint(0, 1 << _BITS, number.shape, dtype=torch.int32, device=number.device, generator=generator)
    bits = noise.add_(number.view(torch.int32))
    # Noise added to the bits of NaN could overflow them into a number.
    bits = torch.where(number.isfinite(), bits, number.view(torch.int32))
    return bits.bitwise_right_shift_(_BITS).to(torch.int16).view(torch.bfloat16)
