"""Numbers in few bits: moments in 8 bits with a scale for each group, weights as bf16 and 8 bits more.

The layout is that of FlashOptim (Gonzalez Ortiz et al. 2026, arXiv:2602.23349). Its companding functions, its 16-bit
scales and its code for zero were replaced, since they lose more (notes/exactness.md, "An optimizer at 7 bytes"):

- A first moment is stored by the square root of its size: codes from -127 to 127, of which 0 is zero.
- A second moment is stored by its fourth root: codes from 0 to 255, the middles of 256 steps, of which none is zero.
  A second moment of zero beside a first one that is not zero would make an update of any size.
- The scale of a group is its largest number, in fp32. Where a whole group decays, only the scale changes, by less than
  16 bits can tell: with the usual second beta, by 1/2000 of a root a step.
- A weight has the upper 24 bits of fp32.

Moments come as rows, each a group.
"""

import torch
from torch import Tensor

GROUP = 64  # numbers with one scale: 8 bytes of scales for 64 parameters
_SIGNED, _STEPS = 127, 255.5
_SMALLEST = torch.finfo(torch.float32).tiny  # in the place of a scale of zero, by which nothing can be divided
_BITS, _HALF = 8, 1 << 7
_QUIET_NAN = 0x7FC00000  # the largest bits that rounding cannot make negative
_GOLDEN = 0x9E3779B1  # the golden ratio in 32 bits: its multiples are spread evenly


def signed_encoded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, as fp32, and scales of numbers of either sign."""
    sizes = numbers.abs()
    scale = sizes.amax(1, keepdim=True)
    codes = sizes.div_(scale.clamp_min(_SMALLEST)).sqrt_().mul_(_SIGNED).copysign_(numbers).round_()
    return codes, scale


def signed_decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers of codes and scales, in fp32."""
    found = codes.float()
    return found.mul_(found.abs()).mul_(scale / _SIGNED**2)


def roots_encoded(roots: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, as fp32 still to be truncated, and scales of the square roots of second moments."""
    scale = roots.amax(1, keepdim=True)
    codes = roots.div(scale.clamp_min(_SMALLEST)).sqrt_().mul_(_STEPS).clamp_max_(255)
    return codes, scale


def squares_decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """The second moments of codes and scales, in fp32."""
    return codes.float().add_(0.5).square_().mul_(scale / _STEPS**2).square_()


def joined(weight: Tensor, error: Tensor) -> Tensor:
    """The fp32 numbers whose upper 24 bits are in a bf16 weight and an int8 error."""
    bits = weight.view(torch.int16).to(torch.int32).mul_(1 << _BITS).add_(error)
    return bits.mul_(1 << _BITS).view(torch.float32)


def split(number: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """fp32 numbers in 24 bits: the nearest bf16, as its bits in int32, and an error from -128 to 127. Overwrites them.

    A number is rounded away from zero if its last 8 bits, as a number, are 256 - `threshold` or more: 128 rounds to
    nearest.
    """
    # A card's NaN has every bit set, and the addition would carry into its sign.
    bits = number.view(torch.int32).clamp_max_(_QUIET_NAN).add_(threshold).bitwise_right_shift_(_BITS)
    upper = bits.add(_HALF).bitwise_right_shift_(_BITS)
    return upper, bits.sub_(upper, alpha=1 << _BITS)


def threshold_of(step: int) -> int:
    """The threshold of `split` in one step: any 256 steps in a row have each value about once.

    So an update far below the last bit counts in as many steps as it should, and a training that is resumed rounds as
    the uninterrupted one.
    """
    return (step * _GOLDEN % (1 << 32)) >> 24
