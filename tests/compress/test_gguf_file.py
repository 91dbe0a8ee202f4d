"""GGUF files: what `transformers` reads back, and what is refused."""

import builtins
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from tiny_sources import logits, tiny_folder, tiny_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from command_line import tightfit
from tightfit.errors import InputError
from tightfit.models.compress.gguf_file import CUTS, FILE, export_gguf
from tightfit.training.data.tokenizer import load_tokenizer

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# `transformers` reads no head_dim of a Qwen3 from GGUF, and takes its default.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
}


@torch.no_grad()
def rounded(model: Any, weights: str) -> Any:
    """The model with its matrices rounded as the file says; groups of 32 share a scale in q8_0."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue
        if weights != "q8_0":
            parameter.copy_(parameter.to(DTYPES[weights]).float())
            continue
        groups = parameter.view(-1, 32)
        scale = groups.abs().amax(1, keepdim=True) / 127
        codes = (groups / scale).abs().add(0.5).floor() * groups.sign()
        parameter.copy_((codes * scale.half().float()).view_as(parameter))
    return model


@pytest.mark.keeps("transformers-reads-exported-gguf")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "weights"), [("llama", "f16"), ("mistral", "q8_0"), ("qwen2", "bf16"), ("qwen3", "q8_0")]
)
def test_transformers_reads_a_gguf_file_with_the_logits_of_the_rounded_weights(kind: str, weights: Any, tmp_path: Path):
    model = tiny_model(kind, **KINDS[kind])
    source = tiny_folder(tmp_path / "source", model)
    export_gguf(source, tmp_path / "out", weights=weights)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=FILE, dtype=torch.float32)
    assert torch.equal(logits(read.eval()), logits(rounded(model, weights)))
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings


@pytest.mark.keeps("transformers-reads-exported-gguf")
def test_a_run_becomes_a_gguf_file_with_its_tokenizer(tmp_path: Path):
    source = tiny_folder(tmp_path / "source", tiny_model("llama"))
    done = tightfit("export", source, "--to", "gguf_q8_0", "--output", tmp_path / "out")
    assert (done.code, "llama as GGUF" in done.out) == (0, True), done.err
    fields = gguf.GGUFReader(tmp_path / "out" / FILE).fields
    said = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "pre", "tokens", "merges")}
    raw, tokens = json.loads((source / "tokenizer.json").read_text()), load_tokenizer(source).tokens
    assert (said["model"], said["pre"]) == ("gpt2", "gpt-2")
    assert {token: i for i, token in enumerate(said["tokens"]) if token in tokens} == tokens
    assert [merge.split(" ") for merge in said["merges"]] == raw["model"]["merges"]
    assert fields["tokenizer.ggml.token_type"].contents()[:2] == [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]


def test_the_ways_to_cut_text_have_the_names_that_llama_cpp_gives_them():
    bytes_after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    threes = PRETOKENIZE_REGEX.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    of_llama3 = pre_tokenizers.Split(Regex(threes), "isolated")
    ways = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "qwen2": pre_tokenizers.Sequence([split, bytes_after]),
        "llama-bpe": pre_tokenizers.Sequence([of_llama3, bytes_after]),
    }
    for name, way in ways.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = way  # pyright: ignore[reportAttributeAccessIssue]
        part = json.loads(tokenizer.to_str())["pre_tokenizer"]
        assert [known for known, is_it in CUTS.items() if is_it(part)] == [name]


@pytest.mark.keeps("transformers-reads-exported-gguf")
def test_what_a_gguf_file_cannot_say_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refusal(name: str, model: Any) -> str:
        source = tiny_folder(tmp_path / name, model)
        with pytest.raises(InputError) as raised:
            export_gguf(source, tmp_path / "out", weights="f16")
        assert not (tmp_path / "out").exists()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "GGUF is written for llama, mistral, qwen2, qwen3, and this is a mixtral" in refusal(
        "a", tiny_model("mixtral")
    )
    assert "attention_bias True cannot be said" in refusal("b", tiny_model("llama", attention_bias=True))
    large = tiny_model("llama")
    large.model.embed_tokens.weight.data[0, 0] = 1e6
    assert "numbers beyond 65,504" in refusal("c", large)
    tokenizer = tmp_path / "c" / "tokenizer.json"
    raw = json.loads(tokenizer.read_text())
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    tokenizer.write_text(json.dumps(raw))
    with pytest.raises(InputError, match="is none of the byte-level BPEs"):
        export_gguf(tmp_path / "c", tmp_path / "out", weights="bf16")
    imported = builtins.__import__
    monkeypatch.setattr(
        builtins, "__import__", lambda name, *rest: _absent(name) if name == "gguf" else imported(name, *rest)
    )
    with pytest.raises(InputError, match="pip install gguf"):
        export_gguf(tmp_path / "c", tmp_path / "out", weights="bf16")


def _absent(name: str) -> Any:
    raise ImportError(name)
