"""The estimate of a generation has the allocator's peak, however many tokens are generated."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tightfit as package
from command_line import mistake, tightfit
from round_device import round_device
from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.models import generation_estimate as estimating
from tightfit.models.generation import generate
from tightfit.models.generation_estimate import estimate_generation
from tightfit.planner.any_code.describe import describe_generation
from tiny import decoder

DEVICE = round_device()
ROUNDING = 64  # bytes: numbers that Python wraps
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {
    "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 100, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0
}  # fmt: skip
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}


def of_transformers(kind, **shape):
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **shape))


MODELS = {
    "decoder": lambda: decoder(**SMALL),
    "decoder with a window": lambda: decoder(**SMALL, attention_window=4),
    "llama": lambda: of_transformers("llama", **SHAPE),
    "qwen3": lambda: of_transformers("qwen3", **SHAPE, head_dim=8),
    "gpt2": lambda: of_transformers("gpt2", **GPT2),
    "mistral with a window": lambda: of_transformers("mistral", **SHAPE, sliding_window=4),
}


def prompts(size=4, length=3):
    return torch.arange(size * length).view(size, length) % 100


def measured(model, ids, new_tokens, chunk_size=512):
    resident = [*model.parameters(), *model.buffers(), ids]
    return measured_peak(
        lambda: generate(model, ids, max_new_tokens=new_tokens, temperature=0, chunk_size=chunk_size), resident
    )


SLOW = pytest.mark.slow  # the same readers as others, with windows: two seconds each


@pytest.mark.keeps("estimate-inference-predicts-allocator")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW) if "window" in n else n for n in MODELS])
def test_the_peak_of_a_generation_is_the_allocators(name):
    model, ids = MODELS[name](), prompts()
    # With the prompt read whole, the peak is in prefill. With one token at a time, it is at the last tokens, behind
    # those that the dry run leaves out, unless the cache has room for all from the beginning, or for a window.
    for new_tokens, chunk_size in ((2, 512), (9, 1)):
        found = estimate_generation(model, ids, new_tokens=new_tokens, device=DEVICE, chunk_size=chunk_size)
        assert abs(found.peak_bytes - measured(model, ids, new_tokens, chunk_size)) <= ROUNDING
        assert sum(found.by_category.values()) == found.peak_bytes
        assert found.weights_bytes == found.by_category["weights"]
    if name in ("llama", "qwen3", "gpt2"):
        heads = 4 if name == "gpt2" else 2
        assert found.peak_phase == "decode"
        assert found.cache_bytes == 4 * 2 * heads * 8 * 11 * 4  # keys and values of 11 tokens that were read, in fp32


@pytest.mark.slow  # the library's own loop takes some seconds to trace and to measure
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_librarys_own_generation_is_traced_too(name):
    model, ids = MODELS[name](), prompts()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    found = package.trace(model.generate, ids, device=DEVICE, **options)
    real = measured_peak(lambda: model.generate(ids, **options), [*model.parameters(), *model.buffers(), ids])
    assert found.peak_bytes == pytest.approx(real, rel=0.001)


@pytest.mark.keeps("estimate-inference-predicts-allocator")
def test_the_tokens_that_are_left_out_change_neither_bytes_nor_seconds(monkeypatch):
    model, ids = decoder(**SMALL), prompts()
    short = estimate_generation(model, ids, new_tokens=30, device=DEVICE)
    monkeypatch.setattr(estimating, "AT_EACH_END", 30)
    whole = estimate_generation(model, ids, new_tokens=30, device=DEVICE)
    assert (short.peak_bytes, short.cache_bytes) == (whole.peak_bytes, whole.cache_bytes)
    assert short.decode_seconds == pytest.approx(whole.decode_seconds, rel=0.005)
    assert short.tokens_per_second == pytest.approx(4 * 29 / whole.decode_seconds, rel=0.005)
    assert 0 < (short.first_token_seconds or 0) < (short.last_token_seconds or 0)


class Uncached(nn.Module):
    """Keeps no keys and values: every token reads the whole text."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


def test_a_model_without_a_cache_reads_everything_at_each_token():
    model, ids = Uncached(), prompts()
    found = estimate_generation(model, ids, new_tokens=12, device=DEVICE)
    assert abs(found.peak_bytes - measured(model, ids, 12)) <= ROUNDING
    assert (found.peak_phase, found.cache_bytes) == ("decode", 0)


@pytest.mark.keeps("seconds-generation-labelled-derived")
def test_on_a_card_the_allocator_rounds_and_reserves_and_seconds_are_labelled():
    model = decoder(**SMALL).to(torch.bfloat16)
    found = estimate_generation(model, prompts(), new_tokens=20, device="rtx4090")
    assert found.weights_bytes == sum(512 * -(-t.nbytes // 512) for t in (*model.parameters(), *model.buffers()))
    assert (found.figures.reserved_bytes or 0) >= found.peak_bytes
    assert "published rates by a roofline" in describe_generation(found)
    assert "no generation was measured" in found.seconds_from


@pytest.mark.parametrize(("new_tokens", "expected"), [(0, "new_tokens is 0"), (510, "more than the 512 positions")])
def test_what_cannot_be_generated_is_refused(new_tokens, expected):
    with pytest.raises(InputError, match=expected):
        estimate_generation(decoder(**SMALL), prompts(), new_tokens=new_tokens, device=DEVICE)


# On the command line

DECODER = ("--model", "models_by_name:decoder", "--device", "rtx4090")


def test_the_command_line_answers_with_a_table_and_with_json():
    asked = ("estimate", *DECODER, "--inference", "--seq-len", 32, "--new-tokens", 20, "--batch-size", 3)
    lines = tightfit(*asked).out.splitlines()
    assert lines[1] == "Inference: 3 texts of 32 tokens, 20 new tokens each; the prompt is read 512 tokens at a time."
    assert any(line.startswith("Decode: ") and "tokens a second" in line for line in lines)
    figures = json.loads(tightfit(*asked, "--json").out)
    assert (figures["batch_size"], figures["prompt_tokens"], figures["new_tokens"]) == (3, 32, 20)
    assert sum(figures["by_category"].values()) == figures["peak_bytes"]
    assert figures["step_seconds"] == figures["prefill_seconds"] + figures["decode_seconds"]
    assert "no generation was measured" in figures["seconds_from"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--new-tokens", 5), "--new-tokens is for --inference"),
        (("--inference", "--optimizer", "sgd"), "--optimizer is about a training step"),
        (("--inference", "--micro-batches", 2), "--micro-batches is about a training step"),
        (("--inference", "--step-in-backward"), "--step-in-backward is about a training step"),
        (("--inference", "--grad-clip", 1), "--grad-clip is about a training step"),
        (("--inference", "--html", "x.html"), "--html is about a training step"),
        (("--inference", "--seq-len", 100, "--new-tokens", 29), "more than the 128 positions of Decoder"),
        (("--inference", "--seq-len", 129), "--seq-len 129 is longer than the 128 positions"),
    ],
    ids=str,
)
def test_misuse_of_the_flags_is_one_line(options, expected):
    assert expected in mistake("estimate", *DECODER, *options)


def test_a_model_that_reads_no_tokens_is_refused():
    assert "is for models of tokens" in mistake(
        "estimate", "--model", "models_by_name:image_model", "--device", "rtx4090", "--inference"
    )
