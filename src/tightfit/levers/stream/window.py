"""Which blocks of a ring are on the device: the one in use and those that are used next, and no others.

Forward uses the blocks in their order, and backward the other way round. So the blocks used last in forward are those
that backward needs first, and those that backward used last are those that the next forward needs first: a block leaves
only when another one needs its place. The same decisions are made in a real step and in a dry run, by different movers.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Mover(Protocol):
    """Moves blocks, by number."""

    def bring(self, number: int) -> None:
        """Begin the copy of a block to the device, into new memory."""
        ...

    def arrive(self, number: int) -> None:
        """Make everything computed from here on wait for the copy."""
        ...

    def save(self, number: int) -> None:
        """Have the host's bytes of a block be those of the device."""
        ...

    def drop(self, number: int) -> None:
        """Free a block's memory on the device."""
        ...

    def announce(self, number: int) -> None:
        """A block is used soon, and has no place on the device yet."""
        ...


class Window:
    """Mutable: the numbers of the blocks that are `here`, of `count`. There is room for `room` of them.

    The first blocks are here from the start, because the next step begins with them.
    """

    def __init__(self, count: int, room: int, ahead: int, mover: Mover):
        self.count, self.room, self.ahead, self.mover = count, min(room, count), ahead, mover
        self.here = set(range(self.room))
        self.current = -1
        self.running: Counter[int] = Counter()  # blocks whose forward runs now, which may call each other

    def use(self, number: int, *, back: bool, again: bool = False) -> None:
        """Have a block on the device, and those that follow on their way.

        `back`: backward runs, from the last block to the first. `again`: forward begins again after the last block,
        because no backward follows.
        """
        following = self._following(number, back, again)
        wanted = {number, *following}
        for each in (number, *following):
            if each in self.here:
                continue
            if not self._make_room(number, wanted) and each != number:
                self.mover.announce(each)
                continue
            self.mover.bring(each)
            self.here.add(each)
        self.mover.arrive(number)
        self.current = number

    def _following(self, number: int, back: bool, again: bool) -> Sequence[int]:
        places = [number - step if back else number + step for step in range(1, self.ahead + 1)]
        if again and not back:
            return [place % self.count for place in places if place % self.count != number]
        return [place for place in places if 0 <= place < self.count]

    def _make_room(self, number: int, wanted: set[int]) -> bool:
        """Drop the blocks that are needed last. False if all that are here are needed."""
        while len(self.here) >= self.room:
            free = [each for each in self.here if each not in wanted and not self.running[each]]
            if not free:
                return False
            last = max(free, key=lambda each: abs(each - number))
            # In this order, Ctrl-C between any two lines loses no update: a block that is not here is copied again.
            self.mover.save(last)
            self.here.discard(last)
            self.mover.drop(last)
        return True
