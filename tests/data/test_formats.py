"""The spellings and containers of data that people have all become the same items."""

import gzip
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from reading import CALL, SAID, TEXTS, TOOL, chatml, decoded, learnt, lines, read, refused, rows, turns

from tightfit.training.data.tokenizer import train_tokenizer


@pytest.mark.keeps("spelling-conversations-preference-pairs")
@pytest.mark.parametrize(
    "records",
    [
        [{"messages": each} for each in turns()],
        [{"conversations": each} for each in turns()],
        [{"id": "a", "conversations": each} for each in turns("from", "value", {"user": "human", "assistant": "gpt"})],
        [{"conversations": each, "score": 0.5} for each in turns(names={"user": "human", "assistant": "model"})],
    ],
    ids=["openai", "minimind", "sharegpt", "mixed"],
)
def test_every_spelling_of_a_conversation_is_the_same_one(tmp_path, tokenizer, records):
    (tmp_path / "a.jsonl").write_text(lines(records))
    store = read(tmp_path / "a.jsonl", tokenizer)
    assert store.kind == "conversations"
    assert decoded(store, tokenizer) == [chatml(each) for each in SAID]
    assert learnt(store, tokenizer) == ["".join(f"{said}<|im_end|>" for who, said in each if who == "assistant")
                                        for each in SAID]  # fmt: skip


@pytest.mark.keeps("spelling-conversations-preference-pairs")
@pytest.mark.parametrize(
    "record",
    [
        {"tools": [TOOL], "system": {}, "calls": [CALL]},
        {"tools": json.dumps([TOOL]), "system": {}, "calls": json.dumps([CALL])},
        {"system": {"tools": json.dumps([TOOL])}, "calls": json.dumps([CALL])},
        {"system": {"functions": [TOOL]}, "calls": [CALL]},
    ],
    ids=["lists", "texts", "in-the-system-turn", "functions"],
)
def test_tools_and_calls_are_found_where_people_write_them(tmp_path, tokenizer, record):
    messages = [
        {"role": "system", "content": "s", **record["system"]},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": record["calls"]},
        {"role": "observation", "content": "o"},
        {"role": "assistant", "content": "a", "thinking": "t"},
    ]
    beside = {"tools": record["tools"]} if "tools" in record else {}
    (tmp_path / "a.jsonl").write_text(lines([{"conversations": messages, **beside}]))
    (text,) = decoded(read(tmp_path / "a.jsonl", tokenizer), tokenizer)
    assert text == (
        f"<|im_start|>system\nTools:\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>system\ns<|im_end|>\n"
        f"<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\no<|im_end|>\n<|im_start|>assistant\n<think>\nt\n</think>\n\na<|im_end|>\n"
    )


USER, GOOD, WORSE = {"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}, {
    "role": "assistant", "content": "bad"}  # fmt: skip


@pytest.mark.keeps("spelling-conversations-preference-pairs")
@pytest.mark.parametrize(
    "record",
    [
        {"chosen": [USER, GOOD], "rejected": [USER, WORSE]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [WORSE]},
        {"prompt": "q", "chosen": [GOOD], "rejected": [WORSE]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, WORSE]},
    ],
    ids=["minimind", "trl", "text-prompt", "ultrafeedback"],
)
def test_every_spelling_of_a_preference_is_a_chosen_and_a_rejected_answer(tmp_path, tokenizer, record):
    (tmp_path / "a.jsonl").write_text(lines([record] * 3))
    store = read(tmp_path / "a.jsonl", tokenizer)
    assert store.kind == "preferences"
    pair = [chatml([("user", "q"), ("assistant", said)]) for said in ("good", "bad")]
    assert decoded(store, tokenizer) == pair * 3
    assert learnt(store, tokenizer) == ["good<|im_end|>", "bad<|im_end|>"] * 3


def test_earlier_turns_that_both_answers_share_are_not_learnt(tmp_path, tokenizer):
    shared = [USER, {"role": "assistant", "content": "shared"}, USER]
    (tmp_path / "a.jsonl").write_text(lines([{"chosen": [*shared, GOOD], "rejected": [*shared, WORSE]}]))
    assert learnt(read(tmp_path / "a.jsonl", tokenizer), tokenizer) == ["good<|im_end|>", "bad<|im_end|>"]


def test_preferences_of_texts_are_prompt_and_answer_without_a_template(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(lines([{"prompt": "one plus one is", "chosen": " two", "rejected": " ten"}]))
    store = read(tmp_path / "a.jsonl", tokenizer)
    assert decoded(store, tokenizer) == ["one plus one is two<|im_end|>", "one plus one is ten<|im_end|>"]
    assert learnt(store, tokenizer) == [" two<|im_end|>", " ten<|im_end|>"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are equal, so nothing is preferred"),
        ({"chosen": "a", "rejected": "b"}, 'so "prompt" must be one'),
        ({"chosen": [USER], "rejected": [USER, GOOD]}, '"chosen" has no turn of the assistant'),
        ({"chosen": [USER, GOOD], "rejected": []}, '"rejected" is empty'),
        ({"chosen": [USER, GOOD], "rejected": "b"}, '"rejected" is str, wanted a list of turns'),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [WORSE]}, '"prompt" is int'),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, '"prompt" must be one'),
        ({"chosen": [USER, GOOD]}, 'no "rejected"'),
    ],
)
def test_what_prefers_nothing_is_refused(tmp_path, tokenizer, record, said):
    (tmp_path / "a.jsonl").write_text(lines([record]))
    assert said in refused(tmp_path / "a.jsonl", tokenizer, format="preferences")


def test_the_format_is_that_of_the_first_line_that_says_one_unless_it_is_given(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" + lines([{"id": 3}, {"messages": turns()[0]}, {"text": "a"}]))
    assert read(path, tokenizer, bad_lines="skip").kind == "conversations"
    assert read(path, tokenizer, bad_lines="skip", format="text").kind == "text"
    assert "data.format is conversations" in refused("default", tokenizer, format="conversations")
    (tmp_path / "a.json").write_text("[]")
    assert "holds no conversations" in refused(tmp_path / "a.json", tokenizer, format="conversations")


def test_conversations_without_a_chat_template_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines([{"messages": turns()[0]}]))
    train_tokenizer(TEXTS, 300).save(tmp_path / "plain")
    assert "has no chat template" in refused(tmp_path / "a.jsonl", str(tmp_path / "plain"))
    folder = tmp_path / "broken"
    train_tokenizer(TEXTS, 300, chat=True).save(folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    assert "chat_template.jinja: the chat template is not valid Jinja" in refused(tmp_path / "a.jsonl", str(folder))


def compressed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content[:100]) + gzip.compress(content[100:]))
    elif path.suffix == ".zst":
        pyarrow = pytest.importorskip("pyarrow")
        frames = [pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:100], content[100:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(content)
    return path


@pytest.mark.keeps("spelling-conversations-preference-pairs")
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".GZ"])
def test_compressed_files_and_folders_hold_what_they_hold_decompressed(tmp_path, tokenizer, suffix):
    content = lines({"text": text} for text in TEXTS).encode()
    expected = [f"{text}<|im_end|>" for text in TEXTS]
    compressed(tmp_path / f"a.jsonl{suffix.lower()}", content).rename(tmp_path / f"a.jsonl{suffix}")
    (tmp_path / "README.md").write_text("no document")
    assert decoded(read(tmp_path / f"a.jsonl{suffix}", tokenizer), tokenizer) == expected
    assert decoded(read(tmp_path, tokenizer), tokenizer) == expected
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        compressed(folder / f"{number:02}.txt{suffix.lower()}", text.encode())
    assert decoded(read(folder, tokenizer), tokenizer) == expected


def hide(monkeypatch, *names):
    """Modules that are as if they were not installed."""
    real = importlib.import_module

    def without(name, *arguments):
        if name in names:
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)


READERS = ("compression.zstd", "zstandard", "pyarrow")


@pytest.mark.keeps("compressed-file-cut-off")
@pytest.mark.parametrize("reader", READERS)
def test_every_package_that_reads_zstd_gives_all_frames_and_refuses_a_cut_one(tmp_path, tokenizer, reader, monkeypatch):
    pytest.importorskip(reader)
    content = lines({"text": f"{text}{'x' * 50_000}"} for text in TEXTS).encode()
    path = compressed(tmp_path / "a.jsonl.zst", content)
    hide(monkeypatch, *(name for name in READERS if name != reader))
    assert len(read(path, tokenizer)) == len(TEXTS)
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) // 2, 10):
        path.write_bytes(whole[:cut])
        assert "the compressed data is damaged or cut off" in refused(path, tokenizer)


@pytest.mark.keeps("compressed-file-cut-off")
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_compressed_file_that_is_damaged_or_cut_is_refused(tmp_path, tokenizer, suffix, damage):
    path = compressed(tmp_path / f"a.jsonl{suffix}", lines({"text": text} for text in TEXTS).encode())
    content = path.read_bytes()
    path.write_bytes(content[:-5] if damage == "cut" else b"plain text that is not compressed")
    for policy in ("strict", "skip"):
        assert "the compressed data is damaged or cut off" in refused(path, tokenizer, bad_lines=policy)


def test_without_anything_that_reads_zstd_the_error_names_the_package(tmp_path, tokenizer, monkeypatch):
    path = compressed(tmp_path / "a.jsonl.zst", lines([{"text": "a"}]).encode())
    hide(monkeypatch, *READERS)
    assert "pip install 'tightfit[data]'" in refused(path, tokenizer)


def test_text_and_json_lines_in_one_folder_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(lines([{"text": "a"}]))
    (tmp_path / "b.txt").write_text("b")
    assert "holds text files (b.txt) and records (a.jsonl)" in refused(tmp_path, tokenizer)


@pytest.mark.keeps("spelling-conversations-preference-pairs")
def test_a_saved_dataset_and_parquet_files_give_what_json_lines_give(tmp_path, tokenizer, datasets):
    for name, records in {
        "texts": [{"text": text, "n": number} for number, text in enumerate(TEXTS)],
        "chats": [{"messages": each} for each in turns()],
        "pairs": [{"chosen": [USER, GOOD], "rejected": [USER, WORSE], "score": 1.0}] * 3,
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(lines(records))
        expected = read(tmp_path / f"{name}.jsonl", tokenizer).fingerprint
        made = rows(datasets, records)
        made.save_to_disk(tmp_path / name)
        datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / f"{name}-splits")
        (tmp_path / f"{name}-parquet").mkdir()
        made.select(range(1)).to_parquet(tmp_path / f"{name}-parquet" / "0.parquet")
        made.select(range(1, len(made))).to_parquet(tmp_path / f"{name}-parquet" / "1.parquet")
        for folder in (name, f"{name}-splits", f"{name}-parquet"):
            assert read(tmp_path / folder, tokenizer).fingerprint == expected, folder


def test_the_rows_of_a_dataset_have_their_numbers_and_unknown_columns_their_names(tmp_path, tokenizer, datasets):
    rows(datasets, [{"text": "a"}, {"text": None}, {"text": "b"}]).save_to_disk(tmp_path / "texts")
    assert f'{tmp_path / "texts"}, row 2: "text" is NoneType' in refused(tmp_path / "texts", tokenizer)
    assert read(tmp_path / "texts", tokenizer, bad_lines="skip").skipped_lines == 1
    rows(datasets, [{"content": "a"}]).save_to_disk(tmp_path / "other")
    assert "its columns are content: wanted text, conversations" in refused(tmp_path / "other", tokenizer)
    made = rows(datasets, [{"text": "a"}])
    datasets.DatasetDict({"one": made, "two": made}).save_to_disk(tmp_path / "splits")
    assert "no split 'train': give the folder of one of one, two" in refused(tmp_path / "splits", tokenizer)
    (tmp_path / "texts" / "state.json").write_text("{}")
    assert "the dataset cannot be read" in refused(tmp_path / "texts", tokenizer)


@pytest.mark.keeps("spelling-conversations-preference-pairs")
def test_a_dataset_by_name_is_read_with_its_options(tokenizer, datasets, monkeypatch):
    """The Hub is not there in tests: `load_dataset` is asked for what the source says."""
    asked = []
    made = rows(datasets, [{"text": text} for text in TEXTS])

    def load(*arguments, **options):
        asked.append((arguments, options))
        return made.to_iterable_dataset() if options["streaming"] else made

    monkeypatch.setattr(datasets, "load_dataset", load)
    first = read("hf:owner/name", tokenizer)
    second = read("hf:owner/name?name=en&split=train[:10]&revision=abc&streaming=true", tokenizer)
    assert asked == [
        (("owner/name", None), {"split": "train", "revision": None, "streaming": False}),
        (("owner/name", "en"), {"split": "train[:10]", "revision": "abc", "streaming": True}),
    ]
    assert first.fingerprint == second.fingerprint
    assert len(first) == len(TEXTS)
    for source in ("hf:", "hf:a/b?splits=x", "hf:a/b?streaming=yes"):
        assert "write hf:NAME" in refused(source, tokenizer)

    def offline(*arguments, **options):
        raise ConnectionError("Couldn't reach\n'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = refused("hf:owner/name", tokenizer)
    assert said.endswith("the dataset cannot be read: ConnectionError: Couldn't reach 'owner/name' on the Hub")


def test_without_the_package_a_dataset_is_refused_with_the_extra(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets: pip install 'tightfit[data]'" in refused(tmp_path / "a.parquet", tokenizer)


@pytest.mark.keeps("most-batch-documents-memory")
def test_documents_are_never_all_in_memory(tmp_path, tokenizer, monkeypatch):
    """At most a batch has been read and is not tokenized yet."""
    from tightfit.training.data import tokenizing

    path = tmp_path / "a.jsonl"
    path.write_text(lines({"text": f"document {number}"} for number in range(1000)))
    alive, most = 0, 0
    real = tokenizing.read_records

    def counted(*arguments, **options):
        nonlocal alive, most
        for found in real(*arguments, **options):
            alive += 1
            most = max(most, alive)
            yield found

    def encoded(self, texts):
        nonlocal alive
        alive -= len(texts)
        return [np.zeros(1, self.dtype) for _ in texts]

    monkeypatch.setattr(tokenizing, "read_records", counted)
    monkeypatch.setattr("tightfit.training.data.tokenizer.TextTokenizer.encode_batch", encoded)
    assert len(read(path, tokenizer)) == 1000
    assert most == tokenizing.ENCODED_AT_ONCE
