"""Tokenizers: byte-level BPE trained on the spot, or one that is loaded."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tightfit.errors import DataError, OutputError, why_unreadable
from tightfit.training.data.bad_lines import BadLine
from tightfit.training.data.chat_template import CHATML, TURN_BEGIN, TURN_END, ChatTemplate
from tightfit.training.data.chats import ChatEncoder

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE, TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"  # of older tokenizers
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIAL_TOKENS, TEMPLATE_FILE)
BYTES = 256  # the least vocabulary is these and the special tokens
# What other tokenizers call the end of a document, where their folder does not say.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Merges of 6400 entries hardly move with more text than this, and training takes about a second. Every k-th document is
# used, k the least that keeps within the limit, so that the sample covers the corpus from end to end.
TRAINING_CHARACTERS = 8_000_000


class TextTokenizer:
    """Text to token ids and back, with the id that ends a document.

    `beside` are the texts of the files beside tokenizer.json, which are saved with it. `template` is the chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_of_text: int,
        *,
        beside: Mapping[str, str] | None = None,
        template: ChatTemplate | None = None,
    ):
        # A document that happens to hold a special token's name must not end itself.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.end_of_text = end_of_text
        self._beside, self._template = dict(beside or {}), template

    @cached_property
    def chat(self) -> ChatEncoder:
        """The encoder of conversations. Raises `DataError` where the tokenizer has no chat template."""
        if self._template is None:
            raise DataError(
                f"the tokenizer has no chat template, which conversations need, nor ChatML's {TURN_BEGIN} and "
                f"{TURN_END} among its tokens: put a {TEMPLATE_FILE} beside its {TOKENIZER_FILE}, or for new weights "
                "train a tokenizer on conversations (data.tokenizer: train)"
            )
        return ChatEncoder(self._tokenizer, self._template)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, if there is one."""
        return None if self._template is None else self._template.text

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id: the rows that a model's embedding must have."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def tokens(self) -> dict[str, int]:
        """The id of each token, special ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, no special token added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, in the smallest unsigned dtype that holds the vocabulary; in parallel over texts."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    @cached_property
    def dtype(self) -> np.dtype:
        """The smallest unsigned dtype that holds the vocabulary: uint16 or uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= np.iinfo(np.uint16).max + 1 else np.uint32)

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens are left out."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def to_text(self) -> str:
        """The contents of tokenizer.json."""
        return self._tokenizer.to_str(pretty=True)

    def to_files(self) -> dict[str, str]:
        """The texts of its files, by name: tokenizer.json and, as they were loaded, those beside it."""
        return {TOKENIZER_FILE: self.to_text(), **self._beside}

    @cached_property
    def digest(self) -> str:
        """The sha256 of its files."""
        return hashlib.sha256(json.dumps(self.to_files(), sort_keys=True).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Writes its files into `folder`. Raises `OutputError`."""
        for name, text in self.to_files().items():
            path = Path(folder) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            except OSError as error:
                raise OutputError(f"{path}: the tokenizer cannot be written: {error.strerror}") from error


def answer_prompt(tokenizer: TextTokenizer, prompt: str) -> tuple[list[int], int]:
    """The ids that ask for an answer to a turn of the user, and the id that ends the answer. Raises `DataError`."""
    try:
        asked = tokenizer.chat.prompt([{"role": "user", "content": prompt}])
        stop = tokenizer.chat.end_of_turn()
    except BadLine as bad:
        raise DataError(f"the prompt cannot be put into the chat template: {bad.reason}") from None
    return asked, tokenizer.end_of_text if stop is None else stop


def train_tokenizer(documents: Iterable[str], vocab_size: int, *, chat: bool = False) -> TextTokenizer:
    """A byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) with at most `vocab_size` entries.

    Any text can be encoded: the 256 bytes are entries themselves. A short corpus gives fewer merges. `documents` are
    read up to twice. With `chat` it has a chat template, ChatML, and its special tokens, and the end of a turn is the
    end of text too. Raises `DataError` where the vocabulary has no room for bytes and special tokens.
    """
    special = [END_OF_TEXT, TURN_BEGIN, TURN_END] if chat else [END_OF_TEXT]
    if vocab_size < BYTES + len(special):
        raise DataError(
            f"data.vocab_size {vocab_size} has no room for {BYTES} bytes and the special tokens "
            f"{', '.join(special)}: make it at least {BYTES + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_sample(documents), trainer)
    # Special tokens come first, in the order in which the trainer is given them.
    if not chat:
        return TextTokenizer(tokenizer, end_of_text=0)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    beside = {TOKENIZER_CONFIG: json.dumps(config, indent=1) + "\n", TEMPLATE_FILE: CHATML}
    template = ChatTemplate(CHATML, _token_names(config), TEMPLATE_FILE)
    return TextTokenizer(tokenizer, end_of_text=special.index(TURN_END), beside=beside, template=template)


def training_sample(documents: Iterable[str]) -> Iterator[str]:
    """Every k-th document, k the least that keeps about `TRAINING_CHARACTERS`; the last one is cut to the limit.

    Documents are read once to count their characters, and a second time if they are too many to keep.
    """
    total, kept = 0, []
    for document in documents:
        total += len(document)
        if total <= TRAINING_CHARACTERS:
            kept.append(document)
        else:
            kept.clear()
    if total <= TRAINING_CHARACTERS:
        yield from kept
        return
    left = TRAINING_CHARACTERS
    for document in islice(documents, 0, None, -(-total // TRAINING_CHARACTERS)):
        if left <= 0:
            return
        yield document[:left]
        left -= len(document)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json, or in a folder that holds one, with its chat template. Raises `DataError`."""
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file}: no such file: give a {TOKENIZER_FILE}, or a folder that holds one")
    paths = [file, *(file.with_name(name) for name in TOKENIZER_FILES[1:] if file.with_name(name).is_file())]
    texts = [_text_of(path) for path in paths]
    names = [TOKENIZER_FILE, *(path.name for path in paths[1:])]
    return read_tokenizer(dict(zip(names, texts, strict=True)), str(file))


def read_tokenizer(texts: Mapping[str, str], place: str) -> TextTokenizer:
    """The tokenizer in the texts of its files, by their names. `place` is what errors name. One that has the tokens of
    ChatML and no template has that of ChatML. Raises `DataError`.
    """
    try:
        tokenizer = Tokenizer.from_str(texts[TOKENIZER_FILE])
    # The tokenizers library raises plain Exception for what it cannot read.
    except Exception as error:
        raise DataError(f"{place}: not a tokenizer: {error}") from error
    beside = {name: text for name, text in texts.items() if name != TOKENIZER_FILE}
    file = Path(place)
    config = _config(file, beside)
    has_turns = all(tokenizer.token_to_id(token) is not None for token in (TURN_BEGIN, TURN_END))
    if has_turns and TEMPLATE_FILE not in beside and "chat_template" not in config:
        beside[TEMPLATE_FILE] = CHATML  # whose tokens these are: it was made for conversations, and lacks their form
    end = _end_of_text(tokenizer, config, file)
    return TextTokenizer(tokenizer, end, beside=beside, template=_template(config, beside, file))


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {why_unreadable(error)}") from error


def _config(file: Path, beside: Mapping[str, str]) -> Mapping[str, Any]:
    """The contents of the files of settings beside a tokenizer; empty where there are none."""
    said: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):  # the second has the last word
        try:
            raw = json.loads(beside.get(name, "{}"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file.with_name(name)}: not valid JSON: {error}") from None
        said.update(raw if isinstance(raw, dict) else {})
    return said


def _token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a configuration names, such as `bos_token`."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    found = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: token for name, token in found.items() if isinstance(token, str)}


def _template(config: Mapping[str, Any], beside: Mapping[str, str], file: Path) -> ChatTemplate | None:
    """The chat template: a file of its own, else in the configuration, where it may be one of several by name."""
    if TEMPLATE_FILE in beside:
        return ChatTemplate(beside[TEMPLATE_FILE], _token_names(config), str(file.with_name(TEMPLATE_FILE)))
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        return None
    return ChatTemplate(found, _token_names(config), str(file.with_name(TOKENIZER_CONFIG)))


def _end_of_text(tokenizer: Tokenizer, config: Mapping[str, Any], file: Path) -> int:
    """The id of the end of a document: what tokenizer_config.json beside the file says, else a name that is known."""
    said = _token_names(config).get("eos_token")
    for name in (said, *_END_NAMES):
        if name is not None and (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise DataError(
        f"{file}: no end-of-text token: name one as eos_token in {TOKENIZER_CONFIG} beside it, or add "
        f"{END_OF_TEXT} to it"
    )
