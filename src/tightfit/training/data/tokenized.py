"""From the section `data` to a tokenizer and a store of items, through the cache."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from tightfit.devices.present import Notice
from tightfit.errors import ConfigError
from tightfit.training.config.schema import DataConfig, ModelConfig, PretrainedModel
from tightfit.training.data.cache import CacheEntry, build, cached, tokens_folder
from tightfit.training.data.content_hash import hash_files
from tightfit.training.data.corpus import Corpus, open_corpus
from tightfit.training.data.store import TokenStore
from tightfit.training.data.tokenizer import TextTokenizer, load_tokenizer, read_tokenizer, train_tokenizer
from tightfit.training.data.tokenizing import CorpusReading, SampleTexts, Tokenizing
from tightfit.training.data.unused import unused_files


@dataclass(frozen=True)
class Tokenized:
    """A source in tokens, and the tokenizer that made them."""

    tokenizer: TextTokenizer
    store: TokenStore


def tokenized(config: DataConfig, model: ModelConfig, notice: Notice) -> Tokenized:
    """The source of the section `data` in tokens: from the cache, else tokenized now and kept there.

    `notice` is told of skipped lines, of fields that are not used, and of a cache that cannot be used. Raises
    `DataError` and `ConfigError`.
    """
    corpus = open_corpus(config.source, config.format)
    reading = CorpusReading(corpus, config.source, config.max_documents, config.bad_lines, config.max_bad_lines)
    tokenizer = loaded_tokenizer(config, model)
    key = _key(config, corpus, tokenizer)
    entry = None if key is None else cached(key, notice)
    if entry is None:
        used = tokenizer or train_tokenizer(SampleTexts(reading), config.vocab_size, chat=corpus.kind != "text")
        entry = build(key, Tokenizing(reading, used), notice)
    _tell_of_skipped(entry, notice)
    for note in (*([unused_files(corpus.unused)] if corpus.unused else []), *entry.notes):
        notice(f"{config.source}: {note}")
    return Tokenized(tokenizer or read_tokenizer(entry.tokenizer, str(tokens_folder())), entry.store)


def _tell_of_skipped(entry: CacheEntry, notice: Notice) -> None:
    skipped = entry.store.skipped_lines
    if skipped:
        lines = "1 bad line was skipped" if skipped == 1 else f"{skipped} bad lines were skipped, the first"
        notice(f"{lines}: {entry.first_skipped}")


def loaded_tokenizer(config: DataConfig, model: ModelConfig) -> TextTokenizer | None:
    """The tokenizer that is named; None where one is trained. Weights that are loaded know the tokens of their own."""
    if config.tokenizer not in ("auto", "train", "model"):
        return load_tokenizer(config.tokenizer)
    folder = Path(model.path) if isinstance(model, PretrainedModel) and not model.random_init else None
    loaded = folder is not None and folder.is_dir()
    if loaded and config.tokenizer == "train":
        raise ConfigError(
            f"data.tokenizer is train, and the weights in {folder} know other tokens: take theirs "
            "(data.tokenizer=model), or new weights (model.random_init=true)"
        )
    if config.tokenizer == "train" or (config.tokenizer == "auto" and not loaded):
        return None
    if not isinstance(model, PretrainedModel):
        raise ConfigError("data.tokenizer is 'model', but model.path is not given: write 'train' or a path")
    path = Path(model.path)
    return load_tokenizer(path if path.is_dir() else path.parent)


def _key(config: DataConfig, corpus: Corpus, tokenizer: TextTokenizer | None) -> Mapping[str, Any] | None:
    """All that the tokens depend on; None where nothing says what the source holds."""
    paths = corpus.files()
    identity = corpus.identity() if paths is None else hash_files(paths, tokens_folder() / "hashed")
    if identity is None:
        return None
    return {
        "source": identity,
        "kind": corpus.kind,
        "max_documents": config.max_documents,
        "bad_lines": config.bad_lines,
        "max_bad_lines": config.max_bad_lines,
        "tokenizer": {"trained": config.vocab_size} if tokenizer is None else tokenizer.digest,
        "code": _code(),
        "packages": {name: version(name) for name in ("tokenizers", "jinja2")},
    }


@cache
def _code() -> str:
    """The hash of the code that makes tokens: another version may make others."""
    digest = hashlib.sha256()
    for source in sorted(files("tightfit.training.data").iterdir(), key=lambda each: each.name):
        if source.name.endswith(".py"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()
