"""Documents into rows of one length, best fit first: hardly any row has room left, and no document is cut for it.

Best-fit-decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3): the longest document
first, each into the fullest row that still has room for it. Documents of one length, and rows with the same room left,
are placed together: of rows with the least sufficient room r, each takes r // length documents before any other row
does. A step of the loop is thus a pair of a length and a room, of which there are few however many documents there are.
The rows are those that the search for each document by itself gives.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedRows:
    """Which pieces each row holds: row i those in `pieces[bounds[i] : bounds[i + 1]]`, in their order in the row."""

    pieces: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.pieces[self.bounds[row] : self.bounds[row + 1]]


def best_fit(lengths: np.ndarray, capacity: int) -> PackedRows:
    """Rows of at most `capacity` tokens that hold pieces of these lengths, each 1 to `capacity`, each piece once.

    Pieces keep their order inside a row, and rows stand in the order of their first pieces. The same lengths give the
    same rows on every machine.
    """
    assert len(lengths) == 0 or 1 <= lengths.min() <= lengths.max() <= capacity, "pieces fit a row"
    row_of = _assigned(np.asarray(lengths, np.int64), capacity)
    first = np.full(row_of.max(initial=-1) + 1, len(row_of))
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    rank = np.empty_like(first)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    row_of = rank[row_of]
    pieces = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=len(first))
    return PackedRows(pieces, np.concatenate(([0], np.cumsum(counts))))


def _assigned(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece."""
    decreasing = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    row_of = np.empty(len(lengths), np.int64)
    shelf, placed = _Shelf(), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            room = shelf.least_room(length) or capacity
            each = room // length
            rows = shelf.take(room, -(-left // each)) if shelf.has(room) else shelf.new(-(-left // each))
            whole = min(left // each, len(rows))  # rows that take as many as they have room for
            taken = np.repeat(rows[:whole], each)
            shelf.put(rows[:whole], room - each * length)
            if whole < len(rows):  # the last one takes the rest
                rest = left - whole * each
                taken = np.concatenate((taken, np.repeat(rows[whole:], rest)))
                shelf.put(rows[whole:], room - rest * length)
            row_of[decreasing[placed : placed + len(taken)]] = taken
            placed, left = placed + len(taken), left - len(taken)
    return row_of


class _Shelf:
    """Mutable: the rows that have room left, by how much."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._rooms: list[int] = []  # sorted
        self._made = 0

    def least_room(self, length: int) -> int | None:
        """The least room that some row has and that is enough."""
        place = bisect_left(self._rooms, length)
        return self._rooms[place] if place < len(self._rooms) else None

    def has(self, room: int) -> bool:
        return room in self._rows

    def new(self, count: int) -> np.ndarray:
        """So many empty rows."""
        self._made += count
        return np.arange(self._made - count, self._made)

    def put(self, rows: np.ndarray, room: int) -> None:
        if room == 0 or len(rows) == 0:
            return
        if room not in self._rows:
            insort(self._rooms, room)
        self._rows.setdefault(room, []).append(rows)

    def take(self, room: int, most: int) -> np.ndarray:
        """At most so many of the rows with this room, those that have had it longest first."""
        chunks, taken, count = self._rows[room], [], 0
        while chunks and count < most:
            chunk = chunks.pop(0)
            wanted = most - count
            if len(chunk) > wanted:
                chunks.insert(0, chunk[wanted:])
                chunk = chunk[:wanted]
            taken.append(chunk)
            count += len(chunk)
        if not chunks:
            del self._rows[room]
            self._rooms.pop(bisect_left(self._rooms, room))
        return np.concatenate(taken)
