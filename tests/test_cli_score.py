import json
import re

import pytest

from command_line import tightfit
from tightfit import score
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.saving import save_model
from tightfit.training.data.tokenizer import train_tokenizer

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

    from tightfit.models.saving import load_model
    from tightfit.training.data.tokenizer import load_tokenizer

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


QUESTIONS = "".join(
    f'{{"question": "the cat sat on {number}", "choices": ["the mat", "the dog\'s hat"], "answer": "A"}}\n'
    for number in range(6)
)


def test_questions_are_scored_and_the_figures_are_those_of_python(run):
    from tightfit import score_choices

    file = run.parent / "cats.jsonl"
    file.write_text(QUESTIONS)
    found = score_choices(run, file, batch_size=4)
    printed = json.loads(tightfit("score", run, "--choices", file, "--batch-size", 4, "--json").out)
    seconds = printed.pop("seconds")
    assert printed == {k: v for k, v in json.loads(json.dumps(found.to_dict())).items() if k != "seconds"}
    assert seconds > 0
    out = tightfit("score", run, "--choices", file, "--budget", "1GiB").out
    assert re.search(rf"cats +6 +{found.overall.accuracy:.1%} ± {found.overall.standard_error:.1%}", out)
    assert re.search(r"predicted (\S+ \S+), measured \1, budget 1.00 GiB", out)


def test_a_folder_of_questions_has_a_line_for_each_file_and_one_for_all(run, tmp_path):
    folder = tmp_path / "val"
    folder.mkdir()
    (folder / "b_val.csv").write_text("id,question,A,B,answer\n1,which,cat,dog,B\n2,what,cat,dog,A\n")
    (folder / "a.jsonl").write_text(QUESTIONS)
    out = tightfit("score", run, "--choices", folder).out
    assert re.search(r"a +6 .*\nb +2 .*\noverall +8 ", out)


def test_what_cannot_be_asked_of_questions_is_one_line(run, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "?", "choices": ["a", "b"], "answer": 7}\n')
    for arguments, message in (
        ((), "none of them is given"),
        (("--choices", file, "--file", file), "both are given"),
        (("--choices", file), "bad.jsonl, line 1: answer 7 is no index of 2 choices"),
        (("--choices", file, "--prompt", "loud"), "--prompt 'loud' is unknown"),
        (("--choices", tmp_path / "none.jsonl"), "cannot be read"),
    ):
        outcome = tightfit("score", run, *arguments)
        assert outcome.code == 2
        assert message in outcome.error
    file.write_text(QUESTIONS)
    outcome = tightfit("score", run, "--choices", file, "--budget", "10KiB")
    assert outcome.code == 3
    assert "one row at a time" in outcome.error


def test_the_score_of_a_text_is_json_where_asked(run):
    figures = json.loads(tightfit("score", run, "--file", run.parent / "text.txt", "--json").out)
    assert sorted(figures) == ["log_likelihood", "perplexity", "tokens"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("cuda:77", "device 'cuda:77' is not in this machine"), ("gpu", "device 'gpu' is none that runs")],
)
def test_a_device_that_is_not_there_is_one_line(run, name, said):
    score_it = ("score", run, "--file", run.parent / "text.txt")
    assert tightfit(*score_it, "--device", "cpu").out == tightfit(*score_it).out
    assert said in tightfit(*score_it, "--device", name).error
    assert said in tightfit("generate", run, "--prompt", "the", "--device", name).error
