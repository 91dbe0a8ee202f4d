"""`--dtype`, `--adapter`, `--base`, `--attention` and `--step-in-backward`: what each changes, and its misuse."""

import json

import pytest
import torch
import transformers
import yaml

import models_by_name
import tightfit as package
from command_line import mistake, tightfit
from tightfit.models.batches import batch_of
from tightfit.models.loading import build_model
from tightfit.training.config import AdapterConfig, PretrainedModel
from tiny import allocator_peak
from tiny_adapters import SHAPE, saved_llama

SIZES = ("--batch-size", 2, "--seq-len", 32)
DECODER = ("--model", "models_by_name:decoder", *SIZES)
LLAMA = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 512}
LORA = "r=4,alpha=8,target_modules=q_proj+v_proj"
TINY_VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8, "num_labels": 10,
}  # fmt: skip
TINY_WHISPER = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 200, "num_mel_bins": 8,
    "max_source_positions": 40, "max_target_positions": 48, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model of transformers."""
    return saved_llama(tmp_path_factory.mktemp("models") / "llama", num_hidden_layers=1)


@pytest.fixture
def config(tmp_path, folder):
    """Writes a configuration of a training of that model, and gives its path."""

    def write(**training):
        path = tmp_path / "training.yaml"
        sections = {"model": {"path": str(folder)}, "data": {"sequence_length": 32}, "training": {"batch_size": 2}}
        sections["training"].update(training)
        path.write_text(yaml.safe_dump(sections))
        return path

    return write


def written(tmp_path, shape):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    return path


def answer(*args):
    outcome = tightfit("estimate", *args, "--json")
    assert outcome.code == 0, outcome
    return outcome.answer


def parameters(*args):
    return answer(*args)["by_category"]["parameters"]


@pytest.mark.keeps("dtype-adapters-base-attention")
@pytest.mark.sampled(2)
def test_the_dtype_of_the_weights_is_an_option_for_every_kind_of_model(tmp_path, folder, config):
    for asked in (DECODER, ("--model", folder, *SIZES), (config(),)):
        # Buffers, such as the decoder's table of angles, stay in fp32.
        assert 0.5 * parameters(*asked) <= parameters(*asked, "--dtype", "bf16") < 0.6 * parameters(*asked)
    stored = ("--model", written(tmp_path, {**LLAMA, "dtype": "bfloat16"}), *SIZES)
    assert answer(*stored, "--dtype", "auto")["weights"] == "bf16"
    assert answer(*stored)["weights"] == "fp32"


@pytest.mark.keeps("dtype-adapters-base-attention")
def test_adapters_and_the_base_below_them_are_options_for_every_kind_of_model(folder, config):
    lora = ("--adapter", "r=4,alpha=8")
    section = PretrainedModel(path=str(folder), adapter=AdapterConfig(r=4, alpha=8.0, base="bf16"))
    held = sum(p.nbytes for p in build_model(section).parameters())
    in_bf16 = parameters("--model", folder, *SIZES, *lora, "--base", "bf16")
    assert in_bf16 == pytest.approx(held, rel=0.01)
    in_nf4 = parameters("--model", folder, *SIZES, *lora, "--base", "nf4")
    assert in_nf4 == parameters(config(), *lora, "--base", "nf4") != in_bf16
    of_decoder = answer(*DECODER, "--adapter", "r=2,target_modules=q_proj+v_proj", "--base", "bf16")
    assert of_decoder["by_category"]["optimizer states"] < 0.3 * answer(*DECODER)["by_category"]["optimizer states"]
    assert of_decoder["weights"] == "bf16 and fp32"


def test_weights_in_four_bits_are_counted_and_named_as_weights(folder):
    asked = ("estimate", "--model", folder, "--seq-len", 32, "--json")
    whole = json.loads(tightfit(*asked).out)
    adapter = ("--adapter", "r=2", "--base", "nf4")
    narrow = json.loads(tightfit(*asked, *adapter).out)
    assert whole["parameters"] < narrow["parameters"] < 1.1 * whole["parameters"]
    assert "nf4" in narrow["weights"]
    kept = json.loads(tightfit(*asked, *adapter, "--dtype", "bf16").out)
    assert "bf16" in kept["weights"]
    assert kept["peak_bytes"] < narrow["peak_bytes"]


def test_a_base_alone_is_below_default_adapters(folder, config):
    asked = ("estimate", "--model", folder, "--seq-len", 32, "--json")
    for base in (("--base", "nf4"), ("--base", "nf4", "--dtype", "bf16")):
        assert tightfit(*asked, *base).answer == tightfit(*asked, "--adapter", "default", *base).answer
    assert parameters(config(), "--base", "nf4") == parameters(config(), "--adapter", "default", "--base", "nf4")
    own = parameters(config(), "model.adapter={r: 3}", "--base", "nf4")
    assert own == parameters(config(), "--adapter", "r=3", "--base", "nf4")


@pytest.mark.slow  # builds a published model
def test_a_generation_is_estimated_in_the_dtype_that_a_model_is_published_in():
    asked = ("estimate", "--model", "smollm2-135m", "--inference", "--seq-len", 16, "--new-tokens", 2, "--device", "l4")
    assert "bf16 weights" in tightfit(*asked).out
    assert "fp32 weights" in tightfit(*asked, "--dtype", "fp32").out


def test_a_plan_with_adapters_is_verified_on_the_real_model(folder):
    outcome = tightfit("verify", "--model", folder, *SIZES, "--adapter", LORA, "--budget", "2x")
    assert outcome.code == 0, outcome
    assert "lora_A" in outcome.out or "equal" in outcome.out


@pytest.mark.keeps("dtype-adapters-base-attention")
def test_a_step_in_backward_is_an_option_and_a_key(config):
    model, batch = models_by_name.decoder(), package.TokenBatch(2, 32, models_by_name.VOCABULARY)
    found = answer(*DECODER, "--step-in-backward")
    assert found["peak_bytes"] == package.estimate(model, batch, step_in_backward=True).peak_bytes
    assert found["optimizer"] == "adamw, step in backward"
    path = config(grad_clip=None)
    by_key = answer(path, "training.step_in_backward=true")
    assert answer(path, "--step-in-backward") == by_key != answer(path)
    assert "step_in_backward and grad_clip 1 exclude each other" in mistake("estimate", config(), "--step-in-backward")
    both = ("--step-in-backward", "--grad-clip", 1)
    assert "step_in_backward and grad_clip 1 exclude each other" in mistake("estimate", *DECODER, *both)


@pytest.mark.keeps("dtype-adapters-base-attention")
@pytest.mark.slow  # a plan for each kind of attention
def test_attention_is_chosen_by_name(tmp_path, config):
    on_card = ("--device", "rtx4090", "--precision", "bf16", "--seq-len", 256)
    asked = ("--model", written(tmp_path, LLAMA), *on_card)
    peaks = {name: answer(*asked, "--attention", name)["peak_bytes"] for name in ("eager", "sdpa")}
    assert peaks["sdpa"] == answer(*asked)["peak_bytes"] < peaks["eager"]
    # Without a mask PyTorch takes its flash attention there, so the package's takes the same bytes.
    by_package = answer(*asked, "--attention", "flash_attention_2")
    assert by_package["peak_bytes"] == peaks["sdpa"]
    assert "PyTorch's flash attention" in by_package["assumptions"][0]
    # A window needs a mask, with which PyTorch cannot take flash attention.
    windowed = written(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 64})
    asked = ("--model", windowed, *on_card)
    assert answer(*asked, "--attention", "flash_attention_2")["peak_bytes"] < answer(*asked)["peak_bytes"]
    assert answer(config(), "--attention", "eager") == answer(config(), "model.attention=eager") != answer(config())


@pytest.mark.sampled(1)
@pytest.mark.keeps("published-model-named-spelling")
@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [
        (TINY_VIT, "ImageClassification", "--seq-len 64 is for models that read tokens"),
        (TINY_WHISPER, "SpeechSeq2Seq", "--seq-len 64 is longer than the 48 positions"),
    ],
    ids=("images", "speech"),
)
def test_a_model_of_images_or_of_speech_has_a_batch_of_its_own(tmp_path, shape, kind, said):
    path = written(tmp_path, shape)
    found = answer("--model", path, "--batch-size", 2)["peak_bytes"]
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(**shape)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(made).train()
    model.config.use_cache = False
    measured = allocator_peak(model, batch_of(model, 2, None, "--seq-len", otherwise=0))
    assert found == pytest.approx(measured, rel=0.001)
    assert answer("--model", path, "--dtype", "bf16")["weights"] == "bf16"
    assert answer("--model", path, "--batch-size", 2, "--adapter", "r=2")["peak_bytes"] < found
    assert said in mistake("estimate", "--model", path, "--seq-len", 64)


@pytest.mark.keeps("dtype-adapters-base-attention")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "fp8"), "--dtype 'fp8' is not known: choose auto, fp32 or bf16"),
        (("--adapter", "default", "--base", "int3"), "--base 'int3' is not known: choose fp32, bf16, int8, fp8 or nf4"),
        (("--adapter", "default", "--dtype", "bf16"), "--dtype bf16 and --adapter are both given: --base is the dtype"),
        (("--adapter", "r"), "'r' is no key=value: write default, or keys of model.adapter"),
        (("--adapter", "r=4,r=8"), "r is given twice"),
        (("--adapter", "r=0"), "--adapter 'r=0': model.adapter.r is 0 (an integer), wanted "),
        (("--adapter", "rank=4"), "unknown key model.adapter.rank"),
        (("--adapter", "base=fp32", "--base", "nf4"), "--base nf4 and base=fp32 in --adapter differ"),
        (("--adapter", "target_modules=nothing"), "none of the model's linear layers"),
        (
            ("--attention", "flesh"),
            "--attention 'flesh' is not known: choose eager, sdpa, flash_attention_2 or chunked",
        ),
        (("--attention", "chunked"), "--attention chunked is the reference decoder's"),
        (("--attention", "flash_attention_2"), "runs on cards of compute capability 8.0 and above"),
        (("--attention", "flash_attention_2", "--device", "t4"), "not on T4"),
        (("--attention", "flash_attention_2", "--device", "l4"), "takes float16 and bfloat16, and got float32"),
        (("--step-in-backward", "--precision", "fp16"), "step_in_backward and precision fp16 exclude each other"),
        (("--step-in-backward", "--optimizer", "lion"), "optimizer 'lion' is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_misuse_is_one_line(folder, options, said):
    assert said in mistake("estimate", "--model", folder, *SIZES, *options)


def test_what_a_model_cannot_have_is_one_line(config):
    assert "reference decoder: choose sdpa or chunked" in mistake("estimate", "--model", "cpu8", "--attention", "eager")
    assert "is no model of transformers" in mistake("estimate", *DECODER, "--attention", "eager")
    assert "GptOssForCausalLM does not have it: choose eager" in mistake(
        "estimate", "--model", "gpt-oss-20b", "--attention", "flash_attention_2", "--device", "h100"
    )
    assert "model.adapter" in mistake("estimate", "--adapter", "r=x", config())
