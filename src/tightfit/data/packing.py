"""Documents packed into samples of one length: a stream of tokens, an end of text after each document, cut evenly."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tightfit.data.tokenizer import TextTokenizer
from tightfit.errors import DataError

# Documents handed to the tokenizer at once: enough for its threads, few enough that their ids take little memory.
ENCODED_AT_ONCE = 64


@dataclass(frozen=True)
class PackedSamples:
    """`tokens` (samples, sequence_length), uint16 or uint32: every row a sample."""

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """The samples at `rows` as input_ids and labels, both (B, T) int64 and equal: the loss makes the shift."""
        ids = torch.from_numpy(self.tokens[np.asarray(rows)].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def encode_documents(documents: Iterable[str], tokenizer: TextTokenizer) -> list[np.ndarray]:
    """Each document's ids with the end of text after them."""
    remaining = iter(documents)
    encoded: list[np.ndarray] = []
    while texts := list(islice(remaining, ENCODED_AT_ONCE)):
        encoded.extend(_ended(ids, tokenizer.end_of_text) for ids in tokenizer.encode_batch(texts))
    return encoded


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


def permutation(count: int, *seeds: int) -> np.ndarray:
    """An order of `count` things, the same for the same seeds on every machine and in every version of numpy.

    numpy keeps the stream of `RandomState` frozen, and that of its newer generators not (NEP 19).
    """
    return np.random.RandomState(seeds).permutation(count)


def _ended(ids: np.ndarray, end_of_text: int) -> np.ndarray:
    return np.append(ids, ids.dtype.type(end_of_text))


@dataclass(frozen=True)
class StreamPosition:
    """Where a `BatchStream` stands: `sample` samples of epoch `epoch` have been given out."""

    epoch: int = 0
    sample: int = 0


class BatchStream(Iterator[dict[str, Tensor]]):
    """Batches without end: every epoch gives each sample once, in an order drawn from the seed and the epoch.

    A batch may reach over the end of an epoch, so every batch is full. All that moves is `position`: a stream made with
    the same samples, batch size and seed continues from it with the same batches.
    """

    def __init__(
        self,
        samples: PackedSamples,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        position: StreamPosition | None = None,
    ):
        self.samples, self.batch_size, self.seed, self.shuffle = samples, batch_size, seed, shuffle
        self.position = position or StreamPosition()
        self._order = self._order_of(self.position.epoch)

    def __next__(self) -> dict[str, Tensor]:
        rows: list[int] = []
        epoch, sample = self.position.epoch, self.position.sample
        while len(rows) < self.batch_size:
            if sample == len(self.samples):
                epoch, sample = epoch + 1, 0
                self._order = self._order_of(epoch)
            taken = self._order[sample : sample + self.batch_size - len(rows)]
            rows.extend(taken.tolist())
            sample += len(taken)
        self.position = StreamPosition(epoch, sample)
        return self.samples.batch(rows)

    def _order_of(self, epoch: int) -> np.ndarray:
        return permutation(len(self.samples), self.seed, epoch) if self.shuffle else np.arange(len(self.samples))
