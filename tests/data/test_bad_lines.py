"""Bad lines: each kind is refused in one line with its place, or skipped and counted."""

import json
import random

import pytest
from bad_corpora import BAD, BAD_CHATS, good, good_chat, write

from tightfit.errors import DataError
from tightfit.training.config import parse_config
from tightfit.training.data import lines as lines_module
from tightfit.training.data.bad_lines import MOST_SKIPPED
from tightfit.training.data.prepare import prepare_data
from tightfit.training.data.tokenized import tokenized
from tightfit.training.data.tokenizer import train_tokenizer


def read(path, notes=None, **data):
    config = parse_config({"data": {"source": str(path), "vocab_size": 300, **data}})
    return tokenized(config.data, config.model, (notes if notes is not None else []).append).store


def items(store):
    return [store.tokens(number).tolist() for number in range(len(store))]


@pytest.mark.keeps("32-kinds-bad-lines")
@pytest.mark.parametrize(("name", "make", "kinds"), [
    *((name, good, BAD) for name in BAD), *((name, good_chat, BAD_CHATS) for name in BAD_CHATS)
])  # fmt: skip
def test_each_kind_is_refused_in_one_line_with_its_place_and_skipped_where_that_is_allowed(tmp_path, name, make, kinds):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([make(0), make(1), kinds[name](random.Random(0)), make(2)]))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 3, column ")
    assert "\n" not in str(caught.value)
    notes = []
    store = read(path, notes, bad_lines="skip")
    assert (len(store), store.skipped_lines) == (3, 1)
    assert notes == [f"1 bad line was skipped: {caught.value}"]


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        (b'{"a": {"text": 1}, "text": "x", "text": "y"}', 33, "'text' stands twice"),
        (b'{"text": "x", "b": [{"c": 1, "d": 2, "c": 3}]}', 38, "'c' stands twice"),
        (b'{"text": "NaN", "b": [1, -Infinity]}', 26, "-Infinity is no number"),
        (rb'{"a": "\ud800", "text": "ok \\ \udc00"}', 32, "half of a surrogate"),
        (b'{"text": "x"} x', 15, "not valid JSON: Extra data"),
        (b"\xff\xfe{\x00", 1, "it is probably UTF-16"),
    ],
)
def test_the_column_is_that_of_what_is_wrong(tmp_path, line, column, said):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl")
    assert f"a.jsonl, line 1, column {column}: " in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ({"id": 1, "conversations": []}, 11, '"conversations" is empty'),
        ({"messages": [{"role": "user", "content": "x"}]}, 2, "no turn of the assistant"),
        ({"messages": [{"role": "bard", "content": "x"}]}, 16, 'is "bard", wanted one of system'),
        ({"messages": [{"role": "user", "content": 3}]}, 32, 'the "content" of a turn is int'),
        ({"conversations": [{"from": "human", "value": [3]}]}, 48, 'a part of the "value" of a turn is int'),
        ({"conversations": [{"from": "human", "value": "x"}, "y"]}, 53, "a turn is str"),
        ({"conversations": [{"role": "assistant", "content": "x", "tool_calls": "[{"}]}, 58, '"tool_calls" is text'),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": {"a": 1}}, 55, '"tools" is dict'),
    ],
)
def test_the_column_of_a_bad_turn_is_that_of_its_part(tmp_path, line, column, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError) as caught:
        read(path, format="conversations")
    assert f"a.jsonl, line 1, column {column}: " in str(caught.value)
    assert said in str(caught.value)


def test_a_line_of_the_wrong_format_says_which_format_it_has(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(good_chat(1) + b"\n")
    with pytest.raises(DataError, match=r'no "text": .*, or set data\.format to conversations'):
        read(tmp_path / "a.jsonl", format="text")


def test_two_turns_that_the_template_refuses_are_a_bad_line(tmp_path):
    folder = tmp_path / "tokenizer"
    train_tokenizer(["a text"], 300, chat=True).save(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    path = tmp_path / "a.jsonl"
    turns = [[user, assistant], [user, user, assistant]]
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    with pytest.raises(DataError, match=r"line 2: the chat template \(.*jinja\) refuses .*: roles must alternate$"):
        read(path, tokenizer=str(folder))
    store = read(path, tokenizer=str(folder), bad_lines="skip")
    assert (len(store), store.skipped_lines) == (1, 1)


def test_a_line_that_is_too_long_is_refused_before_it_is_read_and_the_next_one_has_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MOST_LINE_BYTES", 2000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(good(1) + b"\n" + json.dumps({"text": "x" * 9000}).encode() + b"\n" + good(2) + b"\n{\n")
    with pytest.raises(DataError, match="line 2: longer than"):
        read(path)
    notes = []
    store = read(path, notes, bad_lines="skip")
    assert (len(store), store.skipped_lines) == (2, 2)
    path.write_bytes(path.read_bytes().replace(b"x" * 9000, b"y"))
    with pytest.raises(DataError, match="line 4, column"):
        read(path)


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good(1) + b"\r\n\r\n" + good(2))
    assert len(read(path)) == 2


@pytest.mark.keeps("32-kinds-bad-lines")
def test_more_bad_lines_than_allowed_end_the_reading_in_one_line(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write(path, 100, 30)
    assert read(path, bad_lines="skip", max_bad_lines=30).skipped_lines == 30
    with pytest.raises(DataError, match=r"It is bad line 30, and data\.max_bad_lines is 29: mend the lines, or raise"):
        read(path, bad_lines="skip", max_bad_lines=29)


def test_without_a_number_a_thousand_bad_lines_are_skipped_or_a_twentieth_of_all(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"{\n" * MOST_SKIPPED + good(1))
    assert read(path, bad_lines="skip").skipped_lines == MOST_SKIPPED
    path.write_bytes(b"{\n" * (MOST_SKIPPED + 1) + good(1))
    with pytest.raises(DataError, match=r"first of 1001 bad lines among 1002, .* at most 1000 are skipped"):
        read(path, bad_lines="skip")
    path.write_bytes(b"{\n" * (MOST_SKIPPED + 1) + b'{"text": "a"}\n' * 19 * (MOST_SKIPPED + 1))
    assert read(path, bad_lines="skip").skipped_lines == MOST_SKIPPED + 1


def test_a_source_of_bad_lines_only_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n[\n")
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path / "a.jsonl", bad_lines="skip")


LONG = pytest.mark.slow  # so many lines take a minute


@pytest.mark.keeps("32-kinds-bad-lines")
@pytest.mark.parametrize(
    ("lines", "bad", "kinds", "chat"),
    [
        pytest.param(2000, 40, BAD, False, id="text"),
        pytest.param(1000, 30, BAD_CHATS, True, id="conversations"),
        pytest.param(100_000, 2000, BAD, False, id="much-text", marks=LONG),
        pytest.param(20_000, 400, BAD_CHATS, True, id="many-conversations", marks=LONG),
    ],
)
def test_skipped_lines_are_counted_exactly_and_the_others_are_what_they_are_without_them(
    tmp_path, lines, bad, kinds, chat
):
    path = tmp_path / "corpus.jsonl"
    write(path, lines, bad, kinds=kinds, chat=chat, seed=lines)
    mixed = read(path, bad_lines="skip", max_bad_lines=bad)
    clean = read(path.with_name("good-corpus.jsonl"))
    assert mixed.skipped_lines == bad
    assert clean.skipped_lines == 0
    assert len(mixed) == lines - bad
    assert mixed.fingerprint == clean.fingerprint
    assert items(mixed) == items(clean)


def test_the_count_reaches_the_prepared_data_from_the_cache_too(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write(path, 200, 25)
    config = parse_config(
        {"data": {"source": str(path), "vocab_size": 300, "sequence_length": 16, "bad_lines": "skip"}}
    )
    for _ in range(2):
        notes = []
        data = prepare_data(config.data, config.model, notice=notes.append)
        assert data.skipped_lines == 25
        assert notes[0].startswith(f"25 bad lines were skipped, the first: {path}, line ")
