"""Samples made of whole documents: one a row and padded, or several a row, packed with their boundaries.

A document that is longer than a row goes on in another row, so no token is lost; only a preference pair is cut, since
an answer without its prompt is no answer. Labels are the ids, and -100 where nothing is learnt: padding, what is marked
so, and the first token of each piece, which nothing in its row predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tightfit.training.data.best_fit import PackedRows, best_fit
from tightfit.training.data.store import TokenStore

IGNORE_INDEX = -100
# Of each row, or of each of its tokens: under a reference model, under the policy that drew it, and what it is worth.
REFERENCE, DRAWN, ADVANTAGES = "reference_log_probs", "drawn_log_probs", "advantages"


class Samples(Protocol):
    """The samples from which a training draws its batches.

    `rows` is the number of a batch's rows that one sample gives: 2 for a preference pair. `lengths` (samples,) are the
    tokens of each sample's longest row; `is_even` says that all are alike.
    """

    @property
    def rows(self) -> int: ...

    @property
    def is_even(self) -> bool: ...

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """These samples, as tensors on the CPU."""
        ...

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        """`size` rows of `length` tokens that need at least the memory of any batch of that shape, for dry runs."""
        ...

    def beginning(self, count: int) -> list[int]:
        """The first tokens of the first sample."""
        ...

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class SamplesWith:
    """Samples whose batches a subclass adds something to, in `batch` and `fullest`."""

    samples: Samples

    @property
    def rows(self) -> int:
        return self.samples.rows

    @property
    def is_even(self) -> bool:
        return self.samples.is_even

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.lengths

    def __len__(self) -> int:
        return len(self.samples)

    def beginning(self, count: int) -> list[int]:
        return self.samples.beginning(count)

    def __str__(self) -> str:
        return str(self.samples)


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each (pieces,) int64: which document, from which of its tokens on, how many."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    @classmethod
    def cut(cls, documents: np.ndarray, lengths: np.ndarray, longest: int) -> "Pieces":
        """All tokens of these documents, in pieces of at most `longest`. `lengths` are those of all documents."""
        of_each = lengths[documents]
        counts = -(-of_each // longest)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        start = number * longest
        return cls(np.repeat(documents, counts), start, np.minimum(longest, np.repeat(of_each, counts) - start))

    @classmethod
    def heads(cls, documents: np.ndarray, lengths: np.ndarray, longest: int) -> "Pieces":
        """The first `longest` tokens of each document."""
        return cls(documents, np.zeros_like(documents), np.minimum(longest, lengths[documents]))


class Table:
    """Rows of a batch while they are filled: `ids` and `labels`, both (rows, width) int64, padded."""

    def __init__(self, rows: int, width: int, pad_id: int):
        self.ids = np.full((rows, width), pad_id, np.int64)
        self.labels = np.full((rows, width), IGNORE_INDEX, np.int64)

    def write(self, row: int, at: int, store: TokenStore, pieces: Pieces, piece: int) -> int:
        """Write a piece into a row from position `at` on. Returns the position after it."""
        document, start, length = (int(part[piece]) for part in (pieces.document, pieces.start, pieces.length))
        tokens = store.tokens(document)[start : start + length]
        learnt = store.learnt(document)
        self.ids[row, at : at + length] = tokens
        labels = self.labels[row, at : at + length]
        labels[:] = tokens
        if learnt is not None:
            labels[~learnt[start : start + length]] = IGNORE_INDEX
        labels[:1] = IGNORE_INDEX
        return at + length

    def tensors(self) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.ids), "labels": torch.from_numpy(self.labels)}


@dataclass(frozen=True)
class PaddedSamples:
    """One piece a row, padded on the right with `pad_id` to the longest of the batch. There is no attention mask: with
    causal attention no token sees the padding behind it.

    With two `rows`, pieces 2i and 2i + 1 are the chosen and the rejected answer of sample i.
    """

    store: TokenStore
    pieces: Pieces
    pad_id: int
    rows: int = 1

    def __len__(self) -> int:
        return len(self.pieces) // self.rows

    @property
    def is_even(self) -> bool:
        return False

    @property
    def lengths(self) -> np.ndarray:
        return self.pieces.length.reshape(-1, self.rows).max(axis=1, initial=0)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        chosen = (np.asarray(samples)[:, None] * self.rows + np.arange(self.rows)).ravel()
        table = Table(len(chosen), int(self.pieces.length[chosen].max()), self.pad_id)
        for row, piece in enumerate(chosen.tolist()):
            table.write(row, 0, self.store, self.pieces, piece)
        return table.tensors()

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        return fullest_rows(self.store, self.pieces, size, length)

    def beginning(self, count: int) -> list[int]:
        return beginning(self.store, self.pieces, 0, count)

    def __str__(self) -> str:
        kind = "preference pairs" if self.rows == 2 else self.store.kind if self.store.has_learnt else "documents"
        cut = int(self.store.lengths[self.pieces.document].sum() - self.pieces.length.sum()) if self.rows == 2 else 0
        words = f"{len(self)} {kind} of at most {self.lengths.max(initial=0)} tokens"
        return f"{words}, {cut} tokens beyond data.sequence_length cut off," if cut else words


@dataclass(frozen=True)
class BestFitSamples:
    """Several pieces a row, rows of `length` tokens. `position_ids` (B, T) restart at 0 where a piece begins, and where
    the padding behind the last one does: models take the boundaries from them.
    """

    store: TokenStore
    pieces: Pieces
    packed: PackedRows
    length: int
    pad_id: int

    @classmethod
    def of(cls, store: TokenStore, pieces: Pieces, length: int, pad_id: int) -> "BestFitSamples":
        return cls(store, pieces, best_fit(pieces.length, length), length, pad_id)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def rows(self) -> int:
        return 1

    @property
    def is_even(self) -> bool:
        return True

    @property
    def lengths(self) -> np.ndarray:
        return np.full(len(self), self.length, np.int64)

    @property
    def fill(self) -> float:
        """The share of tokens in the rows that are no padding."""
        return float(self.pieces.length.sum()) / max(len(self) * self.length, 1)

    def batch(self, samples: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        table = Table(len(samples), self.length, self.pad_id)
        positions = np.empty_like(table.ids)
        for row, sample in enumerate(samples):
            begin = 0
            for piece in self.packed[int(sample)].tolist():
                end = table.write(row, begin, self.store, self.pieces, piece)
                positions[row, begin:end] = np.arange(end - begin)
                begin = end
            positions[row, begin:] = np.arange(self.length - begin)
        return {**table.tensors(), "position_ids": torch.from_numpy(positions)}

    def fullest(self, size: int, length: int) -> dict[str, Tensor]:
        return {**fullest_rows(self.store, self.pieces, size, length), "position_ids": two_documents(size, length)}

    def beginning(self, count: int) -> list[int]:
        return beginning(self.store, self.pieces, int(self.packed[0][0]), count)

    def __str__(self) -> str:
        return f"{len(self)} rows of {self.length} tokens, packed by best fit, {self.fill:.1%} full,"


def fullest_rows(store: TokenStore, pieces: Pieces, size: int, length: int) -> dict[str, Tensor]:
    """Rows of some of the data's tokens. Exactly one label is ignored, which is when a chunked loss needs most: it
    drops the tokens of ignored labels, and reads all tokens where they lie if there are none.
    """
    ids = np.resize(store.tokens(int(pieces.document[0])).astype(np.int64), (size, length))
    labels = ids.copy()
    labels[-1, -1] = IGNORE_INDEX
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def two_documents(size: int, length: int) -> Tensor:
    """The position ids (size, length) of rows that hold a document of all tokens but one, and one of one token.

    Models of transformers make a mask only where some row has a boundary; what attends to a document at a time needs
    the more memory the longer the longest is.
    """
    return torch.cat((torch.arange(length - 1), torch.zeros(1, dtype=torch.int64))).repeat(size, 1)


def beginning(store: TokenStore, pieces: Pieces, piece: int, count: int) -> list[int]:
    """The first tokens of a piece."""
    start = int(pieces.start[piece])
    stop = start + min(count, int(pieces.length[piece]))
    return store.tokens(int(pieces.document[piece]))[start:stop].tolist()
