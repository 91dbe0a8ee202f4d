"""The loss head in chunks against the plain one: memory beyond inputs and gradients, time, and how exact gradients are.

Full size is a vocabulary of 128256 at width 2048 and 16384 tokens, bf16 on CUDA; errors are against fp64 at a size
where that is possible.

    python benchmarks/loss_head.py --small [--output results.json]
    python benchmarks/loss_head.py --device cuda
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from taking_turns import options_of, ratios, report, take_turns
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.ops import linear_cross_entropy

FULL, SMALL = (128_256, 2048, 16_384), (8_192, 64, 1_024)  # vocabulary, width, tokens
ERRORS_AT = (2_048, 64, 256)
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


SIDES: dict[str, Head] = {"plain": plain, "chunked": linear_cross_entropy}


def inputs(size: tuple[int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    vocabulary, width, tokens = size
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device, dtype=dtype) / width**0.5).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=device)


def gradients(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(head(hidden, weight, labels), (hidden, weight))


def extra_bytes(head: Head, tensors: tuple[Tensor, Tensor, Tensor]) -> int:
    """Peak of forward and backward above the inputs and both gradients."""
    peak = measured_peak(lambda: gradients(head, *tensors), tensors)
    return peak - storage_bytes(tensors) - storage_bytes(tensors[:2])


def worst_error(head: Head, dtype: torch.dtype, device: str) -> float:
    """The largest error of a gradient against fp64, as a share of its largest element."""
    own = inputs(ERRORS_AT, device, dtype)
    exact = [t.detach().double().requires_grad_() for t in own[:2]]
    truth = gradients(plain_fp64, exact[0], exact[1], own[2])
    return max(
        float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(gradients(head, *own), truth, strict=True)
    )


def plain_fp64(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels)


def measure(small: bool, device: str, rounds: int) -> dict[str, Any]:
    size, dtype = SMALL if small else FULL, torch.bfloat16 if device == "cuda" else torch.float32
    tensors = inputs(size, device, dtype)
    seconds = take_turns(
        {name: lambda head=head: gradients(head, *tensors) for name, head in SIDES.items()}, rounds, device
    )
    extra = {name: extra_bytes(head, tensors) for name, head in SIDES.items()}
    sides = {
        name: {**times, "extra_bytes": extra[name], "gradient_error": worst_error(SIDES[name], dtype, device)}
        for name, times in ratios(seconds, "plain").items()
    }
    return {"shape": size, "dtype": str(dtype), "sides": sides, "extra_of_plain": extra["chunked"] / extra["plain"]}


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(__doc__ or "", arguments, rounds=5)
    report(options, measure(options.small, options.device, options.rounds))


if __name__ == "__main__":
    main()
