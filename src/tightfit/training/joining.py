"""The gradients of several ranks, added up after the last micro-batch of each.

The loss of every rank is divided by the valid tokens of the whole batch, so sums of losses and of gradients are those
of one process with the same batch. A rank that has no sample, or no token to learn, adds zeros.

Before the sum, the ranks agree whether the step goes on. A signal cuts it on one of them only, and it is undone on all.
"""

from collections.abc import Sequence

import torch
from torch import nn

from tightfit.errors import LeverError, PeerFailed
from tightfit.ranks.processes.ranks import Ranks
from tightfit.training.interrupt import Interrupt, Interrupted

GOES_ON, CANNOT_FIT = 0, 1000  # what a rank says of its step; between them, the number of a signal


class OtherCannotFit(PeerFailed):
    """Another rank is out of memory and has no tighter plan. All are here, and the step can be undone."""


def agree(ranks: Ranks, model: nn.Module, word: int) -> None:
    """Tell the others that this rank's step has ended without gradients. Raises as `join` does."""
    _exchange(ranks, word, [0] * len(_trained(model)))


def join(ranks: Ranks, model: nn.Module, loss: torch.Tensor, interrupt: Interrupt) -> torch.Tensor:
    """Replace the gradients by their sums over all ranks, and return the sum of the losses.

    A weight that has a gradient on no rank has none afterwards, as in one process. Raises `Interrupted` where a signal
    has cut another rank's step, `OtherCannotFit` where another rank cannot compute its own.
    """
    trained = _trained(model)
    word, has_gradient = _exchange(ranks, GOES_ON, [int(p.grad is not None) for p in trained])
    if word != GOES_ON:
        interrupt.take(word)
        raise Interrupted
    for parameter, has in zip(trained, has_gradient, strict=True):
        if has and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if has and parameter.grad is not None and parameter.grad.is_sparse:
            raise LeverError(
                "the model has sparse gradients, which ranks do not add up: make its embedding a dense one"
            )
    ranks.add_up([p.grad for p in trained if p.grad is not None])
    return torch.tensor(ranks.total([float(loss)])[0])


def agree_on_signal(ranks: Ranks, interrupt: Interrupt) -> bool:
    """True if a signal has come to any rank; it has come to all then."""
    received = ranks.most(interrupt.received or 0)
    if received:
        interrupt.take(received)
    return bool(received)


def _exchange(ranks: Ranks, word: int, flags: Sequence[int]) -> tuple[int, list[int]]:
    most, *flags = ranks.flags([word, *flags])
    if most == CANNOT_FIT != word:
        raise OtherCannotFit("another rank is out of memory, and no plan is tighter", 3)
    return most, flags


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
