"""How the exactness of an operator is judged: its error against fp64 beside the plain version's own."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Operator = Callable[..., Tensor]


def results(operator: Operator, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Output and the gradient of each input, computed in `dtype`: a scalar's, or for a fixed gradient of the output."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    output = operator(*leaves)
    gradient = torch.ones(())
    if output.dim():
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def squared_error(value: Tensor, truth: Tensor) -> float:
    """Relative to the truth's norm; not a number where the value is not one."""
    return ((value.double() - truth).norm() / truth.norm()).square().item()


def error_ratios(
    operator: Operator, plain: Operator, samples: Iterable[Sequence[Tensor]], dtype: torch.dtype
) -> list[float]:
    """For the output and each gradient: error of `operator` over that of `plain`, each a root mean square over the
    samples.
    """
    mine, theirs = [], []
    for sample in samples:
        inputs = [tensor.to(dtype) for tensor in sample]
        truth = results(plain, inputs, torch.float64)
        for squares, version in ((mine, operator), (theirs, plain)):
            made = results(version, inputs, dtype)
            squares.append([squared_error(value, true) for value, true in zip(made, truth, strict=True)])
    return [
        math.sqrt(sum(ours) / sum(plains))
        for ours, plains in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)
    ]


class OperatorLog(TorchDispatchMode):
    """The operators that run under it: the name of each, and the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.shapes += [tuple(leaf.shape) for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        return out
