"""Which samples the batches of a training hold: a function of the seed and the batch's number, so that a training
resumes anywhere by arithmetic.

The orders of all epochs, one after the other, are one endless sequence of samples, and batch b holds those from
b * batch_size on. With buckets, the batches that begin in an epoch are formed anew among themselves: the same samples,
in batches of alike length.
"""

from collections.abc import Callable

import numpy as np

# Batches that are sorted by length together. More make a batch's lengths more alike, and its samples less random.
POOL = 50
# Lengths of which a plan knows the peak. More would cost more dry runs, each about the time of two steps' Python.
GRID = 8


def permutation(count: int, *seeds: int) -> np.ndarray:
    """An order of `count` things, the same for the same seeds on every machine and in every version of numpy.

    numpy keeps the stream of `RandomState` frozen, and that of its newer generators not (NEP 19).
    """
    return np.random.RandomState(seeds).permutation(count)


class Epochs:
    """The endless sequence of `count` samples, each epoch in an order of its own. Only the last two orders are kept."""

    def __init__(self, count: int, *, seed: int, shuffle: bool):
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._orders: dict[int, np.ndarray] = {}

    def samples(self, first: int, last: int) -> np.ndarray:
        """Those at the places [first, last) of the sequence."""
        parts = [np.empty(0, np.int64)]
        while first < last:
            epoch, begin = divmod(first, self.count)
            part = self._order(epoch)[begin : begin + last - first]
            parts.append(part)
            first += len(part)
        return np.concatenate(parts)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
            made = permutation(self.count, self.seed, epoch) if self.shuffle else np.arange(self.count)
            self._orders[epoch] = made
        return self._orders[epoch]


class Buckets:
    """Batches of samples of alike length.

    An epoch's samples, in their shuffled order, are cut into pools of `POOL` batches, sorted by length inside a pool,
    and cut into batches, whose order is drawn by the seed; the batch with the longest sample goes first, so that a
    training that runs out of memory does so at once. A batch that begins in one epoch and ends in the next belongs to
    the first one, so every batch is full, and every epoch gives each sample once.
    """

    def __init__(self, epochs: Epochs, batch_size: int, lengths: Callable[[], np.ndarray]):
        self.epochs, self.batch_size, self._lengths = epochs, batch_size, lengths
        self._formed: tuple[int, np.ndarray] | None = None

    def batch(self, number: int) -> np.ndarray:
        """The samples of one batch."""
        epoch = number * self.batch_size // self.epochs.count
        if self._formed is None or self._formed[0] != epoch:
            self._formed = epoch, self._form(epoch)
        return self._formed[1][number - self._first(epoch)]

    def _first(self, epoch: int) -> int:
        """The first batch that begins in an epoch."""
        return -(-self.epochs.count * epoch // self.batch_size)

    def _form(self, epoch: int) -> np.ndarray:
        """(batches, batch_size): all batches that begin in an epoch, in their order."""
        size = self.batch_size
        samples = self.epochs.samples(self._first(epoch) * size, self._first(epoch + 1) * size)
        lengths = self._lengths()[samples]
        pools = np.arange(len(samples)) // (POOL * size)
        batches = samples[np.lexsort((lengths, pools))].reshape(-1, size)
        if self.epochs.shuffle:
            batches = batches[permutation(len(batches), self.epochs.seed, epoch, 1)]
        longest = int(self._lengths()[batches].max(axis=1).argmax())
        batches[[0, longest]] = batches[[longest, 0]]
        return batches


def bucket_lengths(lengths: np.ndarray, longest: int) -> list[int]:
    """The lengths to which those of batches are rounded up: multiples of an eighth of `longest`, in ascending order,
    without those to which none is, but always `longest`.
    """
    step = -(-longest // GRID)
    grid = np.unique(np.minimum(np.arange(1, GRID + 1) * step, longest))
    used = grid[np.searchsorted(grid, np.minimum(lengths, longest))]
    return np.union1d(used, [longest]).tolist()
