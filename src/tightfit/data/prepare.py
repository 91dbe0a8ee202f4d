"""From the section `data` to samples: the source tokenized, its items arranged in samples."""

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from tightfit.config.schema import DataConfig, ModelConfig
from tightfit.data.packing import BatchStream, PackedSamples, StreamPosition, hold_out, pack
from tightfit.data.store import Kind, TokenStore
from tightfit.data.tokenized import tokenized
from tightfit.data.tokenizer import TextTokenizer
from tightfit.devices.present import Notice
from tightfit.errors import ConfigError

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
    training: PackedSamples
    validation: PackedSamples
    fingerprint: str = ""
    skipped_lines: int = 0
    kind: Kind = "text"
    objective: Objective = "causal"

    def batches(
        self, batch_size: int, *, seed: int = 0, shuffle: bool = True, position: StreamPosition | None = None
    ) -> BatchStream:
        """The training samples in batches, from `position` on."""
        return BatchStream(self.training, batch_size, seed=seed, shuffle=shuffle, position=position)


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
    store = found.store.all_learnt() if learns == "causal" else found.store
    documents = [store.tokens(item) for item in range(len(store))]
    samples = pack(documents, config.sequence_length, shuffle=config.shuffle, seed=config.seed)
    return PreparedData(
        found.tokenizer,
        *hold_out(samples, config.validation_fraction),
        fingerprint=_fingerprint(store, found.tokenizer, config),
        skipped_lines=store.skipped_lines,
        kind=store.kind,
        objective=learns,
    )


def resolve_objective(objective: Literal["auto", "causal", "sft", "dpo"], kind: Kind) -> Objective:
    """What is learnt from data of a kind: `auto` is its usual objective. Raises `ConfigError` where it has no such."""
    usual = _OBJECTIVES[kind]
    chosen = usual if objective == "auto" else objective
    if chosen == "dpo":
        raise ConfigError(
            "training.objective dpo (preference pairs) cannot be trained yet: give texts or conversations"
        )
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
