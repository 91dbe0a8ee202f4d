"""From the section `data` to samples: the corpus read, the tokenizer trained or loaded, documents packed."""

from dataclasses import dataclass
from pathlib import Path

from tightfit.config.schema import DataConfig, ModelConfig, PretrainedModel
from tightfit.data.corpus import read_documents
from tightfit.data.packing import BatchStream, PackedSamples, StreamPosition, encode_documents, hold_out, pack
from tightfit.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from tightfit.errors import ConfigError


@dataclass(frozen=True)
class PreparedData:
    """A tokenizer and the samples it made; `validation` may be empty."""

    tokenizer: TextTokenizer
    training: PackedSamples
    validation: PackedSamples

    def batches(
        self, batch_size: int, *, seed: int = 0, shuffle: bool = True, position: StreamPosition | None = None
    ) -> BatchStream:
        """The training samples in batches, from `position` on."""
        return BatchStream(self.training, batch_size, seed=seed, shuffle=shuffle, position=position)


def prepare_data(config: DataConfig, model: ModelConfig) -> PreparedData:
    """Reads, tokenizes and packs what the section `data` describes. Raises `DataError` and `ConfigError`."""
    documents = list(read_documents(config.source, max_documents=config.max_documents))
    tokenizer = _tokenizer(config, model, documents)
    encoded = encode_documents(documents, tokenizer)
    samples = pack(encoded, config.sequence_length, shuffle=config.shuffle, seed=config.seed)
    return PreparedData(tokenizer, *hold_out(samples, config.validation_fraction))


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


def _tokenizer(config: DataConfig, model: ModelConfig, documents: list[str]) -> TextTokenizer:
    if config.tokenizer == "train":
        return train_tokenizer(documents, config.vocab_size)
    if config.tokenizer != "model":
        return load_tokenizer(config.tokenizer)
    if not isinstance(model, PretrainedModel):
        raise ConfigError("data.tokenizer is 'model', but model.path is not given: write 'train' or a path")
    path = Path(model.path)
    return load_tokenizer(path if path.is_dir() else path.parent)
