import json

import numpy as np
import pytest

from tightfit.errors import DataError, OutputError
from tightfit.training.data import tokenizer as module
from tightfit.training.data.chat_template import CHATML
from tightfit.training.data.tokenizer import (
    END_OF_TEXT,
    answer_prompt,
    load_tokenizer,
    train_tokenizer,
    training_sample,
)

TEXTS = ["the cat sat on the mat and the dog sat on the cat"] * 4


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, 280)


def test_any_text_comes_back_from_its_ids(trained):
    text = "never seen: äöü 漢字 \x00\n\t🙂"
    assert trained.decode(trained.encode(text)) == text


def test_frequent_words_become_single_tokens_within_the_vocabulary(trained):
    assert len(trained.encode(" the")) == 1
    assert trained.vocab_size <= 280


def test_a_text_that_names_the_end_of_text_does_not_end(trained):
    assert trained.end_of_text not in trained.encode(f"a {END_OF_TEXT} b")
    assert trained.decode(trained.encode(END_OF_TEXT)) == END_OF_TEXT


def test_batches_hold_the_same_ids_in_few_bytes(trained):
    one, two = trained.encode_batch(["the cat", "a dog"])
    assert one.tolist() == trained.encode("the cat")
    assert two.tolist() == trained.encode("a dog")
    assert one.dtype == np.uint16


def test_a_saved_tokenizer_loads_from_its_file_and_from_its_folder(trained, tmp_path):
    trained.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode("the dog sat") == trained.encode("the dog sat")
        assert loaded.end_of_text == trained.end_of_text
        assert loaded.end_of_text not in loaded.encode(END_OF_TEXT)


def test_training_is_repeatable():
    assert train_tokenizer(TEXTS, 280).encode("the cat sat") == train_tokenizer(TEXTS, 280).encode("the cat sat")


def test_the_training_sample_keeps_to_its_limit_and_covers_the_corpus_from_end_to_end(monkeypatch):
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 10)
    assert list(training_sample(["aaaa"] * 9)) == ["aaaa", "aaaa", "aa"]
    assert list(training_sample(["abcdefghijklmnop"])) == ["abcdefghij"]
    assert list(training_sample(["a", "b"])) == ["a", "b"]


def test_the_end_of_text_is_what_the_folder_says(trained, tmp_path):
    trained.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "A"}}))
    assert load_tokenizer(tmp_path).end_of_text == trained.encode("A")[0]


def test_files_that_are_no_tokenizer_are_refused_by_path(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_of_text_is_refused(trained, tmp_path):
    trained.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace(END_OF_TEXT, "<|other|>"), "utf-8")
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(tmp_path)


def test_a_place_that_cannot_be_written_is_refused_by_path(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"tokenizer\.json: the tokenizer cannot be written"):
        trained.save(tmp_path / "file")


def test_a_tokenizer_with_the_turns_of_chatml_and_no_template_has_that_of_chatml(tmp_path):
    made = train_tokenizer(["the sky is blue"], 300, chat=True)
    made.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == made.chat_template == CHATML
    assert loaded.to_files()["chat_template.jinja"] == CHATML, "a run's folder keeps it"
    asked, stop = answer_prompt(loaded, "blue?")
    assert asked == answer_prompt(made, "blue?")[0]
    assert stop == loaded.tokens["<|im_end|>"]
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(tmp_path).chat_template == "{{ messages }}"


def test_a_tokenizer_without_turns_has_no_template(trained):
    assert trained.chat_template is None
    with pytest.raises(DataError, match=r"nor ChatML's <\|im_start\|> and <\|im_end\|> among its tokens"):
        _ = trained.chat
