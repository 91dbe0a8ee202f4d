import pytest
from reading import SAID, TEXTS

from tightfit.training.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([*TEXTS, *(content for turns in SAID for _, content in turns)], 300, chat=True).save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def datasets():
    import datasets

    datasets.disable_progress_bars()
    return datasets
