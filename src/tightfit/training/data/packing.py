"""Documents packed into samples of one length: a stream of tokens, an end of text after each document, cut evenly."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tightfit.errors import ConfigError, DataError
from tightfit.training.data.order import Buckets, Epochs, permutation
from tightfit.training.data.samples import Samples


@dataclass(frozen=True)
class PackedSamples:
    """`tokens` (samples, sequence_length), uint16 or uint32: every row a sample."""

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def rows(self) -> int:
        """Rows of a batch that a sample gives."""
        return 1

    @property
    def is_even(self) -> bool:
        """True if all samples have one length."""
        return True

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample: all are alike."""
        return np.full(len(self.tokens), self.tokens.shape[1], np.int64)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """These samples as input_ids and labels, both (B, T) int64 and equal: the loss makes the shift."""
        ids = torch.from_numpy(self.tokens[np.asarray(samples)].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        """`size` rows: all batches of a stream need the same memory."""
        batch = self.batch(np.arange(size) % len(self))
        return {name: tensor[:, :length] for name, tensor in batch.items()}

    def beginning(self, count: int) -> list[int]:
        """The first tokens of the first sample."""
        return self.tokens[0, :count].tolist()

    def __str__(self) -> str:
        return f"{len(self)} samples of {self.tokens.shape[1]} tokens"


def pack(documents: Sequence[np.ndarray], sequence_length: int, *, shuffle: bool, seed: int) -> PackedSamples:
    """All documents behind one another, in an order drawn by `seed` or their own, cut into samples.

    The last tokens that fill no whole sample are left out. Raises `DataError` where there is not one sample.
    """
    order = permutation(len(documents), seed) if shuffle else range(len(documents))
    stream = np.concatenate([documents[index] for index in order])
    count = len(stream) // sequence_length
    if count == 0:
        raise DataError(
            f"the corpus holds {len(stream)} tokens, fewer than one sample of data.sequence_length {sequence_length}: "
            "shorten the samples or give more text"
        )
    return PackedSamples(stream[: count * sequence_length].reshape(count, sequence_length))


def hold_out(samples: PackedSamples, fraction: float) -> tuple[PackedSamples, PackedSamples]:
    """The samples for training, and the last `fraction` of them, rounded down, for validation.

    They are cut from the end of the stream, so that at most one document is in both.
    """
    held = int(len(samples) * fraction)
    kept = len(samples) - held
    return PackedSamples(samples.tokens[:kept]), PackedSamples(samples.tokens[kept:])


@dataclass(frozen=True)
class StreamPosition:
    """Where a `BatchStream` stands: `sample` samples of epoch `epoch` have been given out.

    `repeat` is how often the last batch was learnt from, where it is learnt from more often than that.
    """

    epoch: int = 0
    sample: int = 0
    repeat: int = 0


class BatchStream(Iterator[dict[str, Tensor]]):
    """Batches without end: every epoch gives each sample once, in an order drawn from the seed and the epoch.

    A batch has `batch_size` rows; it may reach over the end of an epoch, so every batch is full. All that moves is
    `position`: a stream made with the same samples, batch size and seed continues from it with the same batches. With
    `buckets` the samples of a batch are of alike length, and an epoch begins with the longest. Raises `ConfigError`
    where `batch_size` rows are no whole number of samples.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        position: StreamPosition | None = None,
        buckets: bool = False,
    ):
        if batch_size % samples.rows:
            raise ConfigError(
                f"training.batch_size {batch_size} counts sequences, and a preference pair is {samples.rows} of them: "
                "make it even"
            )
        self.samples, self.batch_size = samples, batch_size
        self.position = position or StreamPosition()
        self._size = batch_size // samples.rows
        self._epochs = Epochs(len(samples), seed=seed, shuffle=shuffle)
        self._buckets = Buckets(self._epochs, self._size, lambda: samples.lengths) if buckets else None

    def __next__(self) -> dict[str, Tensor]:
        first = self.position.epoch * len(self.samples) + self.position.sample
        if self._buckets is None:
            chosen = self._epochs.samples(first, first + self._size)
        else:
            chosen = self._buckets.batch(first // self._size)
        self.position = StreamPosition(*divmod(first + self._size, len(self.samples)))
        return self.samples.batch(chosen)
