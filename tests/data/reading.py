"""Sources read by tokens and back, for tests of layouts and spellings."""

import json

import pytest

from tightfit.errors import DataError
from tightfit.training.config import parse_config
from tightfit.training.data.tokenized import tokenized
from tightfit.training.data.tokenizer import load_tokenizer

TEXTS = [f"document {number}, ü 漢字\nwith lines" for number in range(30)]
SAID = [
    [("system", "Be kind."), ("user", f"What is {number}?"), ("assistant", f"A {number}."), ("user", "Sure?"),
     ("assistant", "Yes.")] for number in range(20)
]  # fmt: skip


TOOL = {"name": "look", "parameters": {"type": "object"}}
CALL = {"name": "look", "arguments": {"at": "a"}}


def read(source, tokenizer, notes=None, **data):
    config = parse_config({"data": {"source": str(source), "tokenizer": tokenizer, **data}})
    return tokenized(config.data, config.model, (notes if notes is not None else []).append).store


def refused(source, tokenizer, **data):
    with pytest.raises(DataError) as caught:
        read(source, tokenizer, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def decoded(store, tokenizer):
    loaded = load_tokenizer(tokenizer)
    return [loaded._tokenizer.decode(store.tokens(n).tolist(), skip_special_tokens=False) for n in range(len(store))]


def learnt(store, tokenizer):
    """The learnt text of each item."""
    loaded = load_tokenizer(tokenizer)
    found = []
    for number in range(len(store)):
        flags = store.learnt(number)
        found.append(loaded._tokenizer.decode(store.tokens(number)[flags].tolist(), skip_special_tokens=False))
    return found


def lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def turns(role="role", content="content", names=None):
    names = names or {}
    return [[{role: names.get(who, who), content: said} for who, said in each] for each in SAID]


def chatml(each):
    return "".join(f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in each)


def rows(datasets, records):
    return datasets.Dataset.from_list(records)
