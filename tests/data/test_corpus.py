import json
import pydoc_data.topics

import pytest

from tightfit.errors import DataError
from tightfit.training.data.corpus import read_documents


def lines(folder, *contents):
    path = folder / "corpus.jsonl"
    path.write_bytes(b"\n".join(contents))
    return str(path)


def refused(source):
    with pytest.raises(DataError) as caught:
        list(read_documents(source))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_default_corpus_is_the_help_topics_and_then_the_library_the_same_each_time():
    count = len(pydoc_data.topics.topics) + 5
    documents = list(read_documents("default", max_documents=count))
    assert documents == list(read_documents("default", max_documents=count))
    assert len(documents) == count
    assert documents[0] in pydoc_data.topics.topics.values()
    assert any("import" in document for document in documents[-5:])


def test_json_lines_give_their_texts_in_order_without_blank_lines_and_empty_texts(tmp_path):
    source = lines(tmp_path, b'{"text": "one"}', b"", b'{"text": " "}', json.dumps({"text": "zwei ü"}).encode())
    assert list(read_documents(source)) == ["one", "zwei ü"]


def test_a_broken_json_line_is_told_with_file_line_and_column(tmp_path):
    text = refused(lines(tmp_path, b'{"text": "one"}', b'{"text": }'))
    assert text.startswith(f"{tmp_path / 'corpus.jsonl'}, line 2, column 10: not valid JSON")


def test_an_unfinished_line_keeps_its_own_line_number(tmp_path):
    assert "line 1, column" in refused(lines(tmp_path, b'{"text": "one"', b'{"text": "two"}'))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"content": "x"}', 'line 2, column 1: no "text"'),
        (b'["text"]', 'line 2, column 1: no "text"'),
        (b'{"id": 1, "text": 3}', 'line 2, column 11: "text" is int, wanted a string'),
        (b'{"text": null}', 'line 2, column 2: "text" is NoneType, wanted a string'),
        (b'{"text": "\xff"}', "line 2, column 11: not UTF-8 text"),
    ],
)
def test_a_line_without_a_text_is_told_with_line_and_column(tmp_path, line, expected):
    assert expected in refused(lines(tmp_path, b'{"text": "one"}', line))


@pytest.mark.parametrize(
    ("line", "column"),
    [
        (rb'{"text": "\ud800"}', 11),
        (rb'{"text": "\ud83d\ude00 \udc00"}', 24),
        (rb'{"text": "\ud83d \ude00"}', 11),
        (rb'{"text": "\\ud800 \ud800"}', 19),
        ('{"text": "ü\\ud83dx"}'.encode(), 12),
    ],
)
def test_half_of_a_surrogate_pair_is_told_with_line_and_column(tmp_path, line, column):
    expected = f"line 2, column {column}: half of a surrogate pair"
    assert expected in refused(lines(tmp_path, b'{"text": "one"}', line))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    assert list(read_documents(lines(tmp_path, rb'{"text": "\ud83d\ude00 \\ud800"}'))) == ["\U0001f600 \\ud800"]


def test_a_broken_line_after_the_limit_does_not_matter(tmp_path):
    assert list(read_documents(lines(tmp_path, b'{"text": "one"}', b"{"), max_documents=1)) == ["one"]


def test_a_folder_gives_its_text_files_by_path_and_nothing_else(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert list(read_documents(str(tmp_path))) == ["one", "two"]


def test_one_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    assert list(read_documents(str(tmp_path / "a.txt"))) == ["one\n\ntwo"]


def test_a_corpus_without_text_is_refused(tmp_path):
    assert "holds no text files" in refused(str(tmp_path))
    assert "holds no text:" in refused(lines(tmp_path))
    assert "holds no text:" in refused(lines(tmp_path, b'{"text": ""}'))


def test_a_missing_source_and_a_file_that_is_no_text_are_refused_by_path(tmp_path):
    assert "absent.jsonl': no such file or folder" in refused(str(tmp_path / "absent.jsonl"))
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    assert "a.txt: not UTF-8 text: invalid start byte at byte 3" in refused(str(tmp_path))
