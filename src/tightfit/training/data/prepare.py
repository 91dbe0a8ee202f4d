"""From the section `data` to samples: the source tokenized, its items arranged in samples."""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from tightfit.devices.present import Notice
from tightfit.errors import ConfigError, DataError
from tightfit.training.config.schema import DataConfig, ModelConfig
from tightfit.training.data.order import bucket_lengths, permutation
from tightfit.training.data.packing import BatchStream, StreamPosition, hold_out, pack
from tightfit.training.data.samples import BestFitSamples, PaddedSamples, Pieces, Samples
from tightfit.training.data.store import Kind, TokenStore
from tightfit.training.data.tokenized import tokenized
from tightfit.training.data.tokenizer import TextTokenizer

Objective = Literal["causal", "sft", "dpo", "grpo"]
Chosen = Literal["auto", "causal", "sft", "dpo", "grpo"]
_OBJECTIVES: dict[Kind, Objective] = {"text": "causal", "conversations": "sft", "preferences": "dpo"}
_ARRANGING = ("sequence_length", "validation_fraction", "shuffle", "seed", "packing", "buckets")


@dataclass(frozen=True)
class PreparedData:
    """A tokenizer and the samples it made; `validation` may be empty.

    `fingerprint` is equal where the samples are: made from the same content by the same tokenizer and settings.
    `skipped_lines` are the bad lines of the source.
    """

    tokenizer: TextTokenizer
    training: Samples
    validation: Samples
    fingerprint: str = ""
    skipped_lines: int = 0
    kind: Kind = "text"
    objective: Objective = "causal"
    buckets: bool = False

    def batches(
        self, batch_size: int, *, seed: int = 0, shuffle: bool = True, position: StreamPosition | None = None
    ) -> BatchStream:
        """The training samples in batches, from `position` on."""
        return BatchStream(
            self.training, batch_size, seed=seed, shuffle=shuffle, position=position, buckets=self.buckets
        )

    def for_dry_runs(self, batch_size: int) -> list[dict[str, Tensor]]:
        """Batches that need at least the memory of every one of the training and the evaluation: the longest first, and
        with buckets the shorter ones to whose length others are rounded up.
        """
        lengths = np.concatenate((self.training.lengths, self.validation.lengths))
        longest = int(lengths.max())
        grid = bucket_lengths(lengths, longest) if self.buckets else [longest]
        return [self.training.fullest(batch_size, length) for length in reversed(grid)]


def prepare_data(
    config: DataConfig,
    model: ModelConfig,
    *,
    objective: Chosen = "auto",
    notice: Notice = lambda line: None,
) -> PreparedData:
    """Reads, tokenizes and packs what the section `data` describes, or takes the tokens from the cache.

    `notice` is told in one line each of what was skipped, and of a cache that cannot be used. Raises `DataError` and
    `ConfigError`.
    """
    if objective == "grpo":
        raise ConfigError("training.objective grpo learns from prompts: take causal or sft data, or tightfit train")
    found = tokenized(config, model, notice)
    learns = resolve_objective(objective, found.store.kind)
    store = found.store.all_learnt() if learns == "causal" and found.store.has_learnt else found.store
    return PreparedData(
        found.tokenizer,
        *arrange(store, config, pad_id=found.tokenizer.end_of_text),
        fingerprint=_fingerprint(store, found.tokenizer, config),
        skipped_lines=store.skipped_lines,
        kind=store.kind,
        objective=learns,
        buckets=config.buckets,
    )


def resolve_objective(objective: Chosen, kind: Kind) -> Objective:
    """The objective for data of a kind: `auto` is its usual objective. Raises `ConfigError` where it has no such."""
    usual = _OBJECTIVES[kind]
    chosen = usual if objective == "auto" else objective
    if chosen != usual and not (chosen == "causal" and kind == "conversations"):
        wanted = next(kind for kind, learns in _OBJECTIVES.items() if learns == chosen)
        raise ConfigError(
            f"training.objective is {chosen}, which learns from {wanted}, and the data is {kind}: change the objective "
            "(auto takes the one for the data), or data.source"
        )
    return chosen


def _fingerprint(store: TokenStore, tokenizer: TextTokenizer, config: DataConfig) -> str:
    arranged = {name: getattr(config, name, None) for name in _ARRANGING}
    return hashlib.sha256(
        json.dumps({"items": store.fingerprint, "tokenizer": tokenizer.digest, **arranged}).encode()
    ).hexdigest()


def check_fits(tokenizer: TextTokenizer, vocabulary: int | None, sequence_length: int, positions: int | None) -> None:
    """Raises `ConfigError` where the model has too few embeddings or positions; None means that it has no such limit.

    `vocabulary` is the rows of the model's embedding, `positions` the longest sequence that it reaches.
    """
    if vocabulary is not None and tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokenizer's vocabulary of {tokenizer.vocab_size} (data.tokenizer, data.vocab_size) is larger than "
            f"the model's of {vocabulary} (model.vocab_size): raise model.vocab_size or choose the model's tokenizer"
        )
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"data.sequence_length {sequence_length} is longer than the {positions} positions of the model "
            "(model.max_position_embeddings): lower the one or raise the other"
        )


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
