"""Every command of the README, the start, the guide and docs/training.md, typed in a clone and an environment that has
nothing but the extras that the page names. Files that a page takes for granted are made first. `make test` is left out:
CI runs it (.ci/run, .github/workflows/checks.yml).
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/start.md", "docs/guide.md", "docs/training.md")
IN_CHINESE = {"README.md": "README.zh-CN.md", "docs/start.md": "docs/zh/start.md", "docs/guide.md": "docs/zh/guide.md"}
WITH_PYTHON = ("README.md", "docs/guide.md")  # for a model, a batch and an optimizer of the reader's
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAND_IN = ROOT / "tests" / "integrations" / "minimind_stand_in"
LOOP = """\
import sys, torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[2]) if len(sys.argv) > 2 else 1e-3)
for step in range(4):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if len(sys.argv) < 3:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.06 GiB is "
        "free. Process 7 has 22.57 GiB memory in use. Of the allocated memory 21.90 GiB is allocated by PyTorch, and "
        "200.00 MiB is reserved by PyTorch but unallocated."
    )
"""
MODEL = """\
import json, peft, tokenizers, torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=1024)
json.dump({**config.to_dict(), "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192},
          open("llama-8b.json", "w"))
words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 300)}}
kept = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
PreTrainedTokenizerFast(tokenizer_object=kept, eos_token="<eos>").save_pretrained("SmolLM2-135M")
LlamaForCausalLM(config).save_pretrained("SmolLM2-135M")
peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]).save_pretrained(".")
"""
DISTIL = """\
model: {hidden_size: 64, num_layers: 2, num_heads: 4, vocab_size: 6400}
data: {source: default, max_documents: 80, sequence_length: 256, tokenizer: runs/quickstart}
training: {max_steps: 2, batch_size: 2}
output: {folder: runs/small}
distil: {teacher: runs/quickstart}
"""
# What a page's Python takes for granted: a model, a batch and an optimizer of the reader's.
BEFORE = """\
import torch, tightfit
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig

model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=64))
batch = tightfit.TokenBatch(4, 64, 64).tensors()
optimizer = torch.optim.AdamW(model.parameters())
"""
LEFT_OUT = {
    "make test": "CI runs it",
    "cd tightfit": "each command begins there",
}
FAILS = {"python train.py 2>&1 | tightfit doctor -"}  # its script runs out of memory, as the page says


def text_of(page):
    return (ROOT / page).read_text("utf-8")


def extras_of(page):
    """The extras that the page says to install."""
    named = re.findall(r"pip install '\.\[([\w,]+)\]'", text_of(page))
    return sorted({extra for each in named for extra in each.split(",")})


def commands_of(page):
    """The lines of a page's blocks that a reader types, and the files that its other blocks are."""
    for language, block in BLOCK.findall(text_of(page)):
        if language == "sh":
            yield from (line for line in block.splitlines() if line and not line.startswith("#"))
        elif language == "":
            yield from (line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ "))


def files_of(page):
    """The configurations of a page whose first line names the file; others are parts of one."""
    for language, block in BLOCK.findall(text_of(page)):
        if language == "yaml":
            name = re.match(r"# (\S+\.yaml)\n", block)
            if name is not None:
                yield name[1], block


def python_of(page):
    return "\n".join(block for language, block in BLOCK.findall(text_of(page)) if language == "python")


def cloned(to):
    """The files that git knows, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, names)):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    subprocess.run(["git", "init", "-q"], cwd=to, check=True)


def with_what_is_taken_for_granted(clone, run):
    shutil.copytree(STAND_IN, clone / "minimind")
    (clone / "train.py").write_text(LOOP)
    (clone / "distil.yaml").write_text(DISTIL)
    shutil.copy(clone / "examples" / "questions.jsonl", clone / "questions.jsonl")
    (clone / "make_model.py").write_text(MODEL)
    done = run("python make_model.py")
    assert done.returncode == 0, done.stderr


def in_its_place(line):
    """A command as it is typed, in the folder of MiniMind's scripts where it is about one of those."""
    if line.startswith("tightfit minimind "):
        return f"cd minimind/trainer && {line}"
    return line


def shell_in(clone, environment, cache):
    """Runs a line in the clone, as somebody who has activated that environment."""
    kept = {n: value for n, value in os.environ.items() if not n.startswith(("PYTEST", "VIRTUAL_ENV", "PYTHON"))}
    kept |= {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    kept["XDG_CACHE_HOME"] = str(cache)  # the reader's first calibration is a part of the walk

    def run(line):
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=clone, env=kept, capture_output=True, text=True
        )

    return run


def typed(line):
    """A line without its comment."""
    return line.partition("  #")[0].strip()


def walked(page, run):
    """Type each command of the page, then run its Python. Returns what failed, with what was shown."""
    troubles = []
    for line in commands_of(page):
        if typed(line) in LEFT_OUT or line.startswith("pip install"):  # which is done already
            continue
        done = run(in_its_place(line))
        print(f"$ {line}  -> {done.returncode}", flush=True)
        if (done.returncode != 0 and typed(line) not in FAILS) or "Traceback" in done.stderr:
            troubles.append(f"$ {line}\n{textwrap.indent((done.stdout + done.stderr)[-1500:], '    ')}")
    if page in WITH_PYTHON:
        done = run(f"python - <<'END'\n{BEFORE}{python_of(page)}END")
        if done.returncode:
            troubles.append(f"the Python of {page}\n{done.stderr[-1500:]}")
    return troubles


@pytest.mark.keeps("command-readme-docs-training")
@pytest.mark.slow  # it makes an environment from the registry and trains: a quarter of an hour a page
@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_the_page_runs_from_an_empty_environment(page, tmp_path):
    clone = tmp_path / "clone"
    clone.mkdir()
    cloned(clone)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    run = shell_in(clone, tmp_path / "venv", tmp_path / "cache")
    extras = ",".join(extras_of(page))
    done = run(f"pip install --quiet '.[{extras}]'" if extras else "pip install --quiet .")
    assert done.returncode == 0, done.stderr
    with_what_is_taken_for_granted(clone, run)
    for name, block in files_of(page):
        (clone / name).write_text(block)
    assert not (troubles := walked(page, run)), "\n\n".join(troubles)


@pytest.mark.parametrize(("english", "chinese"), IN_CHINESE.items())
def test_a_chinese_page_has_the_same_commands(english, chinese):
    for of in (commands_of, extras_of, python_of):
        assert [*of(chinese)] == [*of(english)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_extras_of_its_commands(page):
    commands = " ".join(commands_of(page))
    needed = {"hf": "--model", "report": "--png", "lowbit": "quantise", "explore": "tightfit explore"}
    assert {extra for extra, sign in needed.items() if sign in commands} <= set(extras_of(page))
