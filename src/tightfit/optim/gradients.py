"""The memory behind a parameter's `.grad`, whatever stands there."""

from torch import Tensor

from tightfit.optim.host_gradient import HostGradient
from tightfit.optim.in_backward import SpentGradient


def gradient_memory(parameter: Tensor) -> Tensor | None:
    """The tensor that holds a parameter's gradient: on the host, where it was moved there; None where there is none, or
    where a step in backward has used it up.
    """
    gradient = parameter.grad
    if isinstance(gradient, HostGradient):
        return gradient.host()
    return None if isinstance(gradient, SpentGradient) else gradient
