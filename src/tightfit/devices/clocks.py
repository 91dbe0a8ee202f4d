"""The two clocks of a step: the host launches operators, and a card runs their kernels meanwhile."""

from typing import NamedTuple


class Clocks(NamedTuple):
    """Seconds of the host and of the device. On a CPU both are the same: the host computes."""

    host: float
    device: float


class Seconds(float):
    """The seconds of an operator on a card, with those of either clock.

    A number like any other for code that adds prices: the longer of both clocks, as if each operator waited for the one
    before it.
    """

    __slots__ = ("clocks",)
    clocks: Clocks

    @classmethod
    def of(cls, host: float, device: float) -> "Seconds":
        found = cls(max(host, device))
        found.clocks = Clocks(host, device)
        return found


def clocks_of(seconds: float, of_host: float = 0.0) -> Clocks:
    """The clocks of a price, and of further seconds of the host's. A price without clocks is a CPU's."""
    if isinstance(seconds, Seconds):
        return Clocks(seconds.clocks.host + of_host, seconds.clocks.device)
    return Clocks(seconds + of_host, seconds + of_host)
