"""From a source to tokens: what is read again, and what is not."""

import json
import os

import pytest

from tightfit.training.config import parse_config
from tightfit.training.data import content_hash, tokenizing
from tightfit.training.data import tokenized as module
from tightfit.training.data.content_hash import hash_files
from tightfit.training.data.tokenized import tokenized
from tightfit.training.data.tokenizer import train_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {number} of it"}) + "\n" for number in range(40)))
    return path


def entries(cache):
    return sum((path / "manifest.json").exists() for path in cache.iterdir()) if cache.is_dir() else 0


def run(corpus, notes=None, **data):
    config = parse_config({"data": {"source": str(corpus), "vocab_size": 300, **data}})
    return tokenized(config.data, config.model, (notes if notes is not None else []).append)


@pytest.mark.keeps("source-changes-byte-another")
def test_the_second_time_no_record_is_read_and_all_is_the_same(corpus, cache, monkeypatch):
    first = run(corpus)
    monkeypatch.setattr(tokenizing, "read_records", None)
    again = run(corpus)
    assert first.store.fingerprint == again.store.fingerprint
    assert first.tokenizer.to_files() == again.tokenizer.to_files()
    assert [again.store.tokens(n).tolist() for n in range(40)] == [first.store.tokens(n).tolist() for n in range(40)]
    copy = corpus.with_name("copy") / corpus.name
    copy.parent.mkdir()
    copy.write_bytes(corpus.read_bytes())
    assert run(copy).store.fingerprint == first.store.fingerprint
    assert entries(cache) == 1


@pytest.mark.keeps("source-changes-byte-another")
def test_a_source_that_changes_in_one_byte_is_read_again_though_size_and_time_are_the_same(corpus, cache):
    before = run(corpus)
    times = corpus.stat().st_atime_ns, corpus.stat().st_mtime_ns
    corpus.write_bytes(corpus.read_bytes().replace(b"line 17", b"lime 17"))
    os.utime(corpus, ns=times)
    after = run(corpus)
    assert entries(cache) == 2
    assert after.tokenizer.decode(after.store.tokens(17).tolist()) == "lime 17 of it"
    assert before.store.fingerprint != after.store.fingerprint


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 290}, {"max_documents": 7}, {"bad_lines": "skip"}, {"bad_lines": "skip", "max_bad_lines": 3}],
    ids=str,
)
def test_other_settings_are_another_entry(corpus, cache, change):
    run(corpus)
    run(corpus, **change)
    assert entries(cache) == 2


@pytest.mark.keeps("source-changes-byte-another")
def test_settings_that_change_no_token_share_an_entry(corpus, cache):
    run(corpus)
    run(corpus, sequence_length=8, seed=3, shuffle=False, format="text", validation_fraction=0.5)
    assert entries(cache) == 1


@pytest.mark.keeps("source-changes-byte-another")
def test_another_tokenizer_template_or_version_of_the_code_is_another_entry(tmp_path, cache, monkeypatch):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    folder = tmp_path / "tokenizer"
    train_tokenizer(["one text"], 280, chat=True).save(folder)
    first = run(path, tokenizer=str(folder))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n", "assistant: "))
    assert run(path, tokenizer=str(folder)).store.fingerprint == first.store.fingerprint  # only the prompt is another
    train_tokenizer(["another text"], 280, chat=True).save(folder)
    assert run(path, tokenizer=str(folder)).store.fingerprint != first.store.fingerprint
    assert entries(cache) == 3
    monkeypatch.setattr(module, "_code", lambda: "newer")
    run(path, tokenizer=str(folder))
    assert entries(cache) == 4


def test_a_damaged_entry_is_made_again_with_a_note(corpus, cache):
    first = run(corpus)
    (entry,) = (path for path in cache.iterdir() if (path / "manifest.json").exists())
    (entry / "tokens.bin").write_bytes(b"")
    notes = []
    assert run(corpus, notes).store.fingerprint == first.store.fingerprint
    assert len(notes) == 1
    assert "is damaged (tokens.bin has 0 bytes of" in notes[0]
    notes.clear()
    run(corpus, notes)
    assert not notes


def test_a_cache_that_cannot_be_written_changes_nothing_but_a_note(corpus, cache, tmp_path, monkeypatch):
    first = run(corpus)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "file"))
    notes = []
    second = run(corpus, notes)
    assert second.store.fingerprint == first.store.fingerprint
    assert len(notes) == 1
    assert "the tokens are kept in memory" in notes[0]


def test_a_large_file_is_hashed_once_and_again_when_anything_about_it_changes(corpus, cache, monkeypatch):
    monkeypatch.setattr(content_hash, "REMEMBERED_BYTES", 0)
    read = []
    real = content_hash._read
    monkeypatch.setattr(content_hash, "_read", lambda path: read.append(path) or real(path))
    first = hash_files([corpus], cache)
    hash_files([corpus], cache)
    assert len(read) == 2, "a file that was written just now may change within one tick of its times"
    monkeypatch.setattr(content_hash, "_TICK_NS", 0)
    hash_files([corpus], cache)
    assert hash_files([corpus], cache) == first
    assert len(read) == 3
    times = corpus.stat().st_atime_ns, corpus.stat().st_mtime_ns
    corpus.write_bytes(corpus.read_bytes().replace(b"line 17", b"lime 17"))
    os.utime(corpus, ns=times)
    assert hash_files([corpus], cache) != first
    for kept in cache.iterdir():
        kept.write_text("{damaged")
    assert hash_files([corpus], cache) != first
    assert len(read) == 5
