import json

import pytest

from tightfit.errors import ConfigError
from tightfit.training.config import parse_config
from tightfit.training.data.prepare import check_fits, prepare_data
from tightfit.training.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {number} of a small corpus"}) + "\n" for number in range(40)))
    return path


def prepared(corpus, **data):
    settings = {"source": str(corpus), "sequence_length": 8, "vocab_size": 300, "validation_fraction": 0.2, **data}
    config = parse_config({"data": settings})
    return prepare_data(config.data, config.model)


def test_data_is_tokenized_packed_and_split_as_configured(corpus):
    data = prepared(corpus)
    count = len(data.training) + len(data.validation)
    assert len(data.validation) == int(count * 0.2) > 0
    batch = next(data.batches(4))
    assert batch["input_ids"].shape == (4, 8)
    assert batch["input_ids"].max() < data.tokenizer.vocab_size <= 300


def test_the_same_configuration_gives_the_same_samples(corpus):
    assert (prepared(corpus).training.tokens == prepared(corpus).training.tokens).all()
    assert (prepared(corpus).training.tokens != prepared(corpus, seed=1).training.tokens).any()


def test_a_tokenizer_is_loaded_where_one_is_named(corpus, tmp_path):
    train_tokenizer(["other text altogether"], 260).save(tmp_path / "saved")
    data = prepared(corpus, tokenizer=str(tmp_path / "saved"))
    assert data.tokenizer.encode("other") == load_tokenizer(tmp_path / "saved").encode("other")


def test_the_models_own_tokenizer_is_found_in_its_folder(corpus, tmp_path):
    train_tokenizer(["other text altogether"], 260).save(tmp_path)
    config = parse_config({"model": {"path": str(tmp_path)}, "data": {"source": str(corpus), "tokenizer": "model"}})
    assert prepare_data(config.data, config.model).tokenizer.vocab_size <= 260


def test_the_models_tokenizer_without_a_model_folder_is_refused(corpus):
    with pytest.raises(ConfigError, match=r"data\.tokenizer is 'model', but model\.path is not given"):
        prepared(corpus, tokenizer="model")


def test_a_vocabulary_or_a_sequence_that_the_model_cannot_hold_is_refused_with_the_keys():
    tokenizer = train_tokenizer(["text"], 260)
    check_fits(tokenizer, tokenizer.vocab_size, 64, 64)
    check_fits(tokenizer, None, 64, None)
    with pytest.raises(ConfigError, match=r"vocabulary of \d+ \(data\.tokenizer.*larger than the model's of 100"):
        check_fits(tokenizer, 100, 64, 64)
    with pytest.raises(ConfigError, match=r"data\.sequence_length 65 is longer than the 64 positions"):
        check_fits(tokenizer, None, 65, 64)
