"""Tokenized items arranged as the section `data` says: a stream cut evenly, a document a row, or packed rows."""

import numpy as np

from tightfit.errors import ConfigError, DataError
from tightfit.training.config.schema import DataConfig
from tightfit.training.data.order import permutation
from tightfit.training.data.packing import hold_out, pack
from tightfit.training.data.samples import BestFitSamples, PaddedSamples, Pieces, Samples
from tightfit.training.data.store import TokenStore


def arrange(store: TokenStore, config: DataConfig, *, pad_id: int) -> tuple[Samples, Samples]:
    """The samples for training, and those held out for validation. `pad_id` is the end of text.

    A stream is cut in samples first, and the last ones are held out; of documents, conversations and pairs whole ones
    are. Raises `DataError` where nothing is left to train on, `ConfigError` where pairs are to be packed.
    """
    if store.kind == "text" and config.packing == "none" and not config.buckets:
        documents = [store.tokens(item) for item in range(len(store))]
        samples = pack(documents, config.sequence_length, shuffle=config.shuffle, seed=config.seed)
        return hold_out(samples, config.validation_fraction)
    if store.kind == "preferences" and config.packing != "none":
        raise ConfigError(
            f"data.packing {config.packing}: the two answers of a preference pair stand in rows of their own: set "
            "data.packing to none"
        )
    count = len(store) // _rows(store)
    order = permutation(count, config.seed) if config.shuffle else np.arange(count)
    kept = count - int(count * config.validation_fraction)
    training = _samples(store, order[:kept], config, pad_id)
    if len(training) == 0:
        raise DataError(f"data.source {config.source!r} holds no token to train on: give a longer corpus")
    return training, _samples(store, order[kept:], config, pad_id)


def _rows(store: TokenStore) -> int:
    return 2 if store.kind == "preferences" else 1


def _samples(store: TokenStore, chosen: np.ndarray, config: DataConfig, pad_id: int) -> Samples:
    if store.kind == "preferences":
        items = (chosen[:, None] * 2 + np.arange(2)).ravel()
        return PaddedSamples(store, Pieces.heads(items, store.lengths, config.sequence_length), pad_id, rows=2)
    pieces = Pieces.cut(chosen, store.lengths, config.sequence_length)
    if config.packing == "best_fit":
        return BestFitSamples.of(store, pieces, config.sequence_length, pad_id)
    return PaddedSamples(store, pieces, pad_id)
