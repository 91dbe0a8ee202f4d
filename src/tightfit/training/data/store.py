"""Tokenized documents one after another in three flat arrays, in memory or mapped from files."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

Kind = Literal["text", "conversations", "preferences"]


class TokenStore:
    """Items of token ids: documents, conversations, or preference pairs.

    An item of text ends with the end-of-text id. A conversation is its rendered chat template. Of preferences, items 2i
    and 2i + 1 are the chosen and the rejected answer of one pair. Nothing is copied: what `tokens` and `learnt` return
    are views, of memory-mapped files where the arrays are, and must not be written to.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        learnt: np.ndarray | None = None,
        *,
        kind: Kind = "text",
        fingerprint: str | None = None,
        skipped_lines: int = 0,
    ):
        """`tokens` (n,) uint16 or uint32, `offsets` (items + 1,) int64 from 0 to n, `learnt` (n,) bool or None."""
        assert kind in get_args(Kind), kind
        assert tokens.ndim == 1, tokens.shape
        assert tokens.dtype in (np.uint16, np.uint32), tokens.dtype
        assert offsets.dtype == np.int64
        assert (offsets[0], offsets[-1]) == (0, len(tokens))
        assert learnt is None or (learnt.shape == tokens.shape and learnt.dtype == np.bool_)
        assert kind != "preferences" or len(offsets) % 2 == 1, "a chosen answer without its rejected one"
        self._tokens, self._offsets, self._learnt = tokens, offsets, learnt
        self.kind: Kind = kind
        self.skipped_lines = skipped_lines
        self.lengths: np.ndarray = np.diff(offsets)
        """Tokens of each item, (items,) int64."""
        self.fingerprint: str = fingerprint or fingerprint_of(kind, tokens.dtype, _digests(tokens, offsets, learnt))
        """Equal for equal content made from it, and for no other."""

    @classmethod
    def from_lists(
        cls,
        items: Sequence[Sequence[int] | np.ndarray],
        learnt: Sequence[Sequence[bool] | np.ndarray] | None = None,
        *,
        kind: Kind = "text",
        skipped_lines: int = 0,
    ) -> "TokenStore":
        """A store in memory. `learnt` has a flag for each token of each item."""
        lengths = np.array([len(item) for item in items], dtype=np.int64)
        assert learnt is None or [len(flags) for flags in learnt] == lengths.tolist()
        tokens = np.concatenate([np.asarray(item, dtype=np.int64) for item in items]) if len(items) else np.zeros(0)
        dtype = np.uint16 if tokens.max(initial=0) <= np.iinfo(np.uint16).max else np.uint32
        flags = None
        if learnt is not None:
            parts = [np.asarray(flags, dtype=np.bool_) for flags in learnt]
            flags = np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return cls(tokens.astype(dtype), offsets, flags, kind=kind, skipped_lines=skipped_lines)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def dtype(self) -> np.dtype:
        """Of the ids: uint16 where the vocabulary allows it, else uint32."""
        return self._tokens.dtype

    @property
    def has_learnt(self) -> bool:
        """True if some tokens are marked as learnt; without marks all are."""
        return self._learnt is not None

    def tokens(self, item: int) -> np.ndarray:
        """The ids of one item, (length,)."""
        return self._tokens[self._span(item)]

    def learnt(self, item: int) -> np.ndarray | None:
        """Which tokens of an item the loss counts, (length,) bool; None where it counts all."""
        return None if self._learnt is None else self._learnt[self._span(item)]

    def all_learnt(self) -> "TokenStore":
        """The same items, every token of which counts in the loss."""
        fingerprint = hashlib.sha256(f"{self.fingerprint} all learnt".encode()).hexdigest()
        return TokenStore(
            self._tokens, self._offsets, kind=self.kind, fingerprint=fingerprint, skipped_lines=self.skipped_lines
        )

    def _span(self, item: int) -> slice:
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return slice(int(self._offsets[item]), int(self._offsets[item + 1]))


def fingerprint_of(kind: Kind, dtype: np.dtype, digests: Mapping[str, str]) -> str:
    """The fingerprint of a store from the sha256 of its arrays, by their names."""
    arrays = " ".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(f"{kind} {dtype} {arrays}".encode()).hexdigest()


def _digests(tokens: np.ndarray, offsets: np.ndarray, learnt: np.ndarray | None) -> dict[str, str]:
    arrays = {"tokens": tokens, "offsets": offsets, "learnt": learnt}
    return {
        name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        for name, array in arrays.items()
        if array is not None
    }
