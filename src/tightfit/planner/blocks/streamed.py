"""The seconds that a step waits for streamed weights, from the seconds of its blocks: no trace is made.

A step with streamed blocks has three clocks: the host's and the device's, which a block's own seconds hold, and the
link's. Recompute makes backward longer, and so gives the link more time. Which blocks come when is decided by the real
window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.levers.stream.window import Window


@dataclass(frozen=True)
class BlockSeconds:
    """The seconds of a block in one micro-batch: of its forward, of its backward with what it recomputes, of the copy
    of its weights to the device (None where these are there), and of the copies of what it offloads, on their way back.
    """

    forward: float
    backward: float
    weights: float | None = None
    fetched: float = 0.0


def waiting_seconds(blocks: Sequence[BlockSeconds], *, ahead: int, room: int, in_parallel: bool) -> float:
    """The seconds in which a micro-batch waits for the link. `blocks` are in forward order.

    The device has room for `room` streamed blocks, and `ahead` of them are on their way while one runs. Without
    `in_parallel` nothing is computed while something is copied.
    """
    places = [place for place, block in enumerate(blocks) if block.weights is not None]
    numbers = {place: number for number, place in enumerate(places)}
    clock = _LinkClock([blocks[place].weights or 0.0 for place in places], in_parallel)
    window = Window(len(places), room, ahead, clock)
    for back in (False, True):
        for place, block in reversed([*enumerate(blocks)]) if back else enumerate(blocks):
            if place in numbers:
                window.use(numbers[place], back=back)
            fetched = clock.copy(block.fetched) if back and block.fetched else 0.0
            clock.now += block.backward if back else block.forward
            clock.wait(fetched)
    return clock.waited


class _LinkClock:
    """Mutable: moves blocks of a window in time alone. `now` is the time of the computation."""

    def __init__(self, seconds: Sequence[float], in_parallel: bool):
        self._seconds, self._in_parallel = seconds, in_parallel
        self._free = 0.0  # when the link is
        self._ends: dict[int, float] = {}
        self.now = self.waited = 0.0

    def copy(self, seconds: float) -> float:
        """The end of a copy that is requested now."""
        self._free = max(self.now, self._free) + seconds
        if not self._in_parallel:
            self.wait(self._free)
        return self._free

    def wait(self, end: float) -> None:
        """Have the computation wait for the end of a copy."""
        late = max(0.0, end - self.now)
        self.now += late
        self.waited += late

    def bring(self, number: int) -> None:
        self._ends[number] = self.copy(self._seconds[number])

    def arrive(self, number: int) -> None:
        self.wait(self._ends.pop(number, 0.0))

    def save(self, number: int) -> None:
        """Does nothing: what goes back to the host has the other direction of the link."""

    def drop(self, number: int) -> None:
        """Does nothing: bytes are no matter of this clock."""

    def announce(self, number: int) -> None:
        """Does nothing: a block that has no place yet is copied when it has one."""
