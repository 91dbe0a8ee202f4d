"""From the section `data` to samples: the source tokenized, its items arranged in samples."""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from tightfit.devices.present import Notice
from tightfit.errors import ConfigError
from tightfit.training.config.schema import DataConfig, ModelConfig
from tightfit.training.data.arrange import arrange
from tightfit.training.data.order import bucket_lengths
from tightfit.training.data.packing import BatchStream, StreamPosition
from tightfit.training.data.samples import Samples
from tightfit.training.data.store import Kind, TokenStore
from tightfit.training.data.tokenized import tokenized
from tightfit.training.data.tokenizer import TextTokenizer

Objective = Literal["causal", "sft", "dpo"]
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
    objective: Literal["auto", "causal", "sft", "dpo"] = "auto",
    notice: Notice = lambda line: None,
) -> PreparedData:
    """Reads, tokenizes and packs what the section `data` describes, or takes the tokens from the cache.

    `notice` is told in one line each of what was skipped, and of a cache that cannot be used. Raises `DataError` and
    `ConfigError`.
    """
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


def resolve_objective(objective: Literal["auto", "causal", "sft", "dpo"], kind: Kind) -> Objective:
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
