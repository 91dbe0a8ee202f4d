import re

import pytest

from command_line import tightfit
from tightfit import score
from tightfit.data.tokenizer import train_tokenizer
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.saving import save_model

TEXT = "the cat sat on the mat and the dog ate the cat's hat\n" * 4


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with a text beside it."""
    tokenizer = train_tokenizer([TEXT], 270)
    save_model(Decoder(DecoderConfig(hidden_size=8, num_layers=1, num_heads=2, vocab_size=270)), tmp_path / "run")
    tokenizer.save(tmp_path / "run")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "run"


def test_a_text_is_scored_in_pieces_and_the_figures_are_those_of_python(run):
    import torch

    from tightfit.data.tokenizer import load_tokenizer
    from tightfit.models.saving import load_model

    out = tightfit("score", run, "--file", run.parent / "text.txt", "--chunk-size", 16).out
    scored = score(load_model(run), torch.tensor(load_tokenizer(run).encode(TEXT)), chunk_size=None)
    assert re.search(rf"tokens scored +{scored.tokens}\n", out)
    assert f"{scored.log_likelihood:.2f} nats" in out
    assert re.search(rf"perplexity +{scored.perplexity:.2f}\n", out)
    assert re.search(
        r"tokens scored +9\n", tightfit("score", run, "--file", run.parent / "text.txt", "--max-tokens", 10).out
    )


def test_what_cannot_be_scored_is_one_line(run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "long.txt").write_text(TEXT * 200)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("none.txt", "cannot be read"),
        ("empty.txt", f"{tmp_path / 'empty.txt'}: holds too little text, 0 tokens"),
        ("long.txt", "the model's positions reach 2048"),
        ("binary.txt", "not UTF-8 text"),
    ):
        outcome = tightfit("score", run, "--file", tmp_path / name)
        assert outcome.code == 2
        assert message in outcome.error
    assert "give the folder of a finished run" in tightfit("score", tmp_path / "no", "--file", tmp_path / "x").error
