"""Each option and key that names a file, given one that is missing, a folder, bytes or broken text: one line that names
the file, in words and not in Python's.
"""

import re

import pytest

from command_line import tightfit
from models_by_name import decoder
from tightfit.models.own import save_decoder
from tightfit.training.data.tokenizer import train_tokenizer

SMALL = "model: {hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 300}\ndata: {sequence_length: 32}\n"
QUESTION = ("--model", "models_by_name:decoder", "--seq-len", 16, "--device", "rtx4090")
TRAINED = ("train", "small.yaml", "output.folder=run", "training.max_steps=1")
# {} is the file. The names: what of the command reads it.
COMMANDS = {
    "adapter of an estimate": ("estimate", *QUESTION, "--adapter", "{}.json"),
    "adapter of a plan": ("plan", *QUESTION, "--budget", "0.5x", "--adapter", "{}.json"),
    "adapter of recipes": ("fit", "--model", "gpt2", "--device", "rtx4090", "--adapter", "{}.json"),
    "adapter of a training": (*TRAINED, "model={{path: model, adapter: {{config: {}.json}}}}"),
    "configuration": ("train", "{}.yaml"),
    "configuration of a plan": ("plan", "{}.yaml", "--budget", "0.5x"),
    "model": ("estimate", "--model", "{}.json", "--device", "rtx4090"),
    "data": (*TRAINED, "data.source={}.jsonl"),
    "tokenizer": (*TRAINED, "data.tokenizer={}.json"),
    "log": ("doctor", "{}.log"),
    "log of a report": ("doctor", "--report", "{}.log"),
    "run to generate": ("generate", "{}", "--prompt", "x"),
    "run to compare": ("runs", "compare", "{}", "model"),
    "run to show": ("runs", "show", "{}"),
    "text to score": ("score", "model", "--file", "{}.txt"),
    "text of quality": ("quantise", "model", "--to", "int8", "--output", "made", "--text", "{}.txt"),
    "text to rank by": (
        "prune",
        "model",
        "--ffn",
        "0.5",
        "--output",
        "made",
        "--by",
        "gradient",
        "--calibration",
        "{}.txt",
    ),
    "source to export": ("export", "{}", "--to", "transformers", "--output", "made"),
}
CONTENTS = {"missing": None, "folder": "", "bytes": b"\xc1\x00\xff\xfe", "broken": b"{\n"}
PYTHONS = re.compile(r"\[Errno|codec can't|Traceback|Error\(|FileNotFoundError|IsADirectoryError")
ANY_TEXT = {"text to score", "text of quality", "text to rank by", "data"}  # where broken JSON is a text as any other


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in CONTENTS.items():
        for suffix in ("", ".json", ".yaml", ".jsonl", ".log", ".txt"):
            path = folder / f"{name}{suffix}"
            if content == "":
                path.mkdir()
            elif content is not None:
                path.write_bytes(content)
    (folder / "small.yaml").write_text(SMALL)
    (folder / "model").mkdir()
    save_decoder(decoder(), folder / "model")
    train_tokenizer(["a text of words"], 257).save(folder / "model")
    return folder


@pytest.mark.sampled(36)
@pytest.mark.keeps("input-mistake-prints-line")
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_cannot_be_read_is_one_line_that_names_it(command, content, place, monkeypatch):
    if content == "broken" and command in ANY_TEXT:
        pytest.skip("it is a text")
    monkeypatch.chdir(place)
    outcome = tightfit(*(str(part).format(content) for part in COMMANDS[command]))
    assert outcome.code == 2
    assert content in outcome.error
    assert not PYTHONS.search(outcome.error)
