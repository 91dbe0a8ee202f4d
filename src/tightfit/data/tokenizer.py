"""Tokenizers: byte-level BPE trained on the spot, or one that is loaded."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tightfit.errors import DataError, OutputError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
# What other tokenizers call the end of a document, where their folder does not say.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Merges of 6400 entries hardly move with more text than this, and training takes about a second. Every k-th document is
# used, k the least that keeps within the limit, so that the sample covers the corpus from end to end.
TRAINING_CHARACTERS = 8_000_000


class TextTokenizer:
    """Text to token ids and back, with the id that ends a document."""

    def __init__(self, tokenizer: Tokenizer, end_of_text: int):
        # A document that happens to hold a special token's name must not end itself.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_of_text = end_of_text

    @property
    def vocab_size(self) -> int:
        """One more than the highest id: the rows that a model's embedding must have."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, in the smallest unsigned dtype that holds the vocabulary; in parallel over texts."""
        dtype = np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=dtype) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def to_text(self) -> str:
        """What tokenizer.json holds."""
        return self._tokenizer.to_str(pretty=True)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json into `folder`. Raises `OutputError`."""
        path = Path(folder) / TOKENIZER_FILE
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.to_text(), "utf-8")
        except OSError as error:
            raise OutputError(f"{path}: the tokenizer cannot be written: {error.strerror}") from error


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with at most `vocab_size` entries.

    Any text can be encoded: the 256 bytes are entries themselves. A short corpus gives fewer merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_sample(documents), trainer)
    # Special tokens come first, in the order in which the trainer is given them.
    return TextTokenizer(tokenizer, end_of_text=0)


def training_sample(documents: Sequence[str]) -> Iterator[str]:
    """Every k-th document, k the least that keeps about `TRAINING_CHARACTERS`; the last one is cut to the limit."""
    total = sum(map(len, documents))
    step = max(1, -(-total // TRAINING_CHARACTERS))
    left = TRAINING_CHARACTERS
    for document in documents[::step]:
        if left <= 0:
            return
        yield document[:left]
        left -= len(document)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json, or in a folder that holds one. Raises `DataError`."""
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such file: give a {TOKENIZER_FILE}, or a folder that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The tokenizers library raises plain Exception for a file that it cannot read.
    except Exception as error:
        raise DataError(f"{file}: not a tokenizer: {error}") from error
    return TextTokenizer(tokenizer, _end_of_text(tokenizer, file))


def _end_of_text(tokenizer: Tokenizer, file: Path) -> int:
    """The id of the end of a document: what tokenizer_config.json beside the file says, else a name that is known."""
    for name in _said_to_end(file.with_name("tokenizer_config.json")):
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    for name in _END_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise DataError(
        f"{file}: no end-of-text token: name one as eos_token in tokenizer_config.json beside it, or add "
        f"{END_OF_TEXT} to it"
    )


def _said_to_end(path: Path) -> Iterable[str]:
    if not path.is_file():
        return ()
    try:
        raw: Any = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    token = raw.get("eos_token") if isinstance(raw, dict) else None
    content = token.get("content") if isinstance(token, dict) else token
    return (content,) if isinstance(content, str) else ()
