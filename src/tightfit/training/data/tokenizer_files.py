"""A tokenizer's files as `transformers` reads them: tokenizer.json and what stands beside it."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from tightfit.training.data.tokenizer import TOKENIZER_FILE, load_tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
# What `transformers` may put beside tokenizer.json (`PreTrainedTokenizerFast.save_pretrained`).
BESIDE = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")


def tokenizer_files(folder: Path, *others: Path) -> dict[str, bytes]:
    """The tokenizer of a folder by file name, none where it has none. What does not stand beside it is taken from the
    first of the `others` with the same tokenizer; a tokenizer_config.json is made where none has one. Raises
    `DataError`.
    """
    main = folder / TOKENIZER_FILE
    if not main.is_file():
        return {}
    files = {TOKENIZER_FILE: main.read_bytes()}
    same = [other for other in others if _vocabulary(other) == _vocabulary(folder)]
    for name in BESIDE:
        source = next((place / name for place in (folder, *same) if (place / name).is_file()), None)
        if source is not None:
            files[name] = source.read_bytes()
    if TOKENIZER_CONFIG not in files:
        files[TOKENIZER_CONFIG] = _new_config(folder).encode()
    return files


def _new_config(folder: Path) -> str:
    end = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).id_to_token(load_tokenizer(folder).end_of_text)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    return json.dumps(config, indent=2) + "\n"


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / TOKENIZER_FILE
    return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) if path.is_file() else None
