"""Finds the memory of a parameter's gradient."""

from torch import Tensor

from tightfit.optim.host_gradient import HostGradient
from tightfit.optim.in_backward import SpentGradient


def gradient_memory(parameter: Tensor) -> Tensor | None:
    """The tensor that holds a parameter's gradient, which may be on the host.

    None if there is no gradient, or if a step in backward has used it up.
    """
    gradient = parameter.grad
    if isinstance(gradient, HostGradient):
        return gradient.host()
    return None if isinstance(gradient, SpentGradient) else gradient
