"""Lines of JSON that hold no record, of many kinds, and corpora with some of them among good lines."""

import json
import random
from collections.abc import Callable
from pathlib import Path

Make = Callable[[random.Random], bytes]


def good(number: int) -> bytes:
    return json.dumps({"text": f"line {number} of a corpus, ü 漢字 🙂"}, ensure_ascii=number % 2 == 0).encode()


def good_chat(number: int) -> bytes:
    turns = [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number + 1}."},
    ]
    if number % 3 == 0:
        turns = [{"from": "human", "value": f"And {number}?"}, {"from": "gpt", "value": "One more.\n"}]
    return json.dumps({"messages" if number % 2 else "conversations": turns}).encode()


def _turns(*turns: object) -> bytes:
    return json.dumps({"conversations": list(turns)}).encode()


# Of any format.
BAD: dict[str, Make] = {
    "no JSON": lambda draw: b"not JSON at all",
    "cut off": lambda draw: b'{"text": "ends in the mid',
    "not UTF-8": lambda draw: b'{"text": "caf\xe9 %d"}' % draw.randrange(9),
    "half a surrogate pair": lambda draw: rb'{"text": "\ud83d alone"}',
    "a list": lambda draw: b'["text"]',
    "a number": lambda draw: b"%d" % draw.randrange(99),
    "another key": lambda draw: b'{"content": "x"}',
    "a number for text": lambda draw: b'{"text": %d}' % draw.randrange(99),
    "a list for text": lambda draw: b'{"text": ["x"]}',
    "null": lambda draw: b'{"text": null}',
    "null as a line": lambda draw: b"null",
    "a key twice": lambda draw: b'{"text": "a", "text": "b"}',
    "NaN": lambda draw: b'{"text": "a", "score": NaN}',
    "too deep": lambda draw: b'{"text": "a", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "two objects": lambda draw: b'{"text": "a"} {"text": "b"}',
    "a control character": lambda draw: b'{"text": "a\x01b"}',
    "single quotes": lambda draw: b"{'text': 'a'}",
    "too many digits": lambda draw: b'{"text": "a", "n": ' + b"7" * 5000 + b"}",
    "a bad escape": lambda draw: rb'{"text": "\x41"}',
    "another encoding": lambda draw: '{"text": "ab"}'.encode("utf-16"),
}
BAD_CHATS: dict[str, Make] = {
    **{name: BAD[name] for name in ("no JSON", "cut off", "not UTF-8", "a list", "a key twice", "NaN")},
    "no turns": lambda draw: b'{"text": "a document"}',
    "empty": lambda draw: _turns(),
    "not a list": lambda draw: b'{"conversations": "hello"}',
    "no role": lambda draw: _turns({"content": "x"}),
    "unknown role": lambda draw: _turns({"role": "narrator", "content": "x"}, {"role": "assistant", "content": "y"}),
    "no content": lambda draw: _turns({"role": "user"}, {"role": "assistant", "content": "y"}),
    "null content": lambda draw: _turns({"role": "user", "content": None}, {"role": "assistant", "content": "y"}),
    "a list for content": lambda draw: _turns({"role": "user", "content": [{"type": "text", "text": "x"}]}),
    "a turn that is text": lambda draw: _turns("hello", "hi"),
    "no answer": lambda draw: _turns({"role": "user", "content": "x"}),
    "half a pair inside": lambda draw: rb'{"messages": [{"role": "assistant", "content": "\udc00"}]}',
    "calls that are no list": lambda draw: _turns({"role": "assistant", "content": "", "tool_calls": 3}),
}


def write(path: Path, lines: int, bad: int, *, kinds: dict[str, Make] = BAD, chat: bool = False, seed: int = 0) -> None:
    """`lines` lines, of which `bad` are bad, their kinds and places drawn by the seed; and beside it the good ones."""
    draw = random.Random(seed)
    names = [*kinds, *(draw.choice([*kinds]) for _ in range(bad - len(kinds)))]
    places = dict(zip(draw.sample(range(lines), bad), names, strict=True))
    make = good_chat if chat else good
    with path.open("wb") as mixed, path.with_name(f"good-{path.name}").open("wb") as clean:
        for number in range(lines):
            name = places.get(number)
            line = make(number) if name is None else kinds[name](draw)
            mixed.write(line + b"\n")
            if name is None:
                clean.write(line + b"\n")
