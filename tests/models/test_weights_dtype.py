"""Weights in bf16 and fp32: built, loaded, predicted, trained, saved."""

import json

import pytest
import torch
import transformers

from tightfit import TokenBatch, estimate
from tightfit.errors import ConfigError
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.loading import build_model, weights_dtype, without_weights
from tightfit.models.saving import load_model, save_model
from tightfit.step import StepSettings
from tightfit.tracing.build import build_dry
from tightfit.training.config import AdapterConfig, PretrainedModel, parse_config
from tightfit.training.optimizer import OptimizerRecipe, rounding_note
from tiny import allocator_peak, decoder, token_batch
from tiny_adapters import SHAPE

IDS = torch.arange(24).reshape(2, 12)


def llama(folder, dtype=torch.float32):
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(dtype).save_pretrained(folder)
    return str(folder)


def dtypes(model):
    return {parameter.dtype for parameter in model.parameters()}


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.mark.keeps("checkpoint-loaded-own-dtype")
@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float16, "auto", torch.float32),
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
    ],
    ids=str,
)
def test_a_checkpoint_is_loaded_in_its_own_dtype_or_the_one_asked_for(tmp_path, stored, asked, found):
    section = PretrainedModel(path=llama(tmp_path, stored), dtype=asked)
    model = build_model(section)
    assert dtypes(model) == {found}
    assert dtypes(build_dry(lambda: build_model(without_weights(section)))) == {found}


def test_a_checkpoint_whose_config_names_no_dtype_has_that_of_its_weights(tmp_path):
    llama(tmp_path, torch.bfloat16)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}))
    assert weights_dtype(PretrainedModel(path=str(tmp_path))) == "bf16"


def test_new_weights_are_fp32_unless_asked_for(bf16_folder):
    assert dtypes(build_model(PretrainedModel(path=bf16_folder, random_init=True))) == {torch.float32}
    assert dtypes(build_model(PretrainedModel(path=bf16_folder, random_init=True, dtype="bf16"))) == {torch.bfloat16}


def test_a_decoder_in_bf16_is_the_fp32_one_rounded_and_its_angles_are_not():
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64, "num_experts": 2}
    full, rounded = (build_model(DecoderConfig(**shape, dtype=dtype), seed=1) for dtype in ("auto", "bf16"))
    for one, other in zip(full.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)
    assert {buffer.dtype for buffer in rounded.buffers()} == {torch.float32}
    assert rounded.head.weight is rounded.embedding.weight
    assert rounded(IDS).logits.dtype == torch.bfloat16


@pytest.mark.keeps("checkpoint-loaded-own-dtype")
@pytest.mark.parametrize("asked", ["auto", "fp32"])
def test_a_saved_decoder_keeps_its_dtype_and_is_read_in_another_where_asked(tmp_path, asked):
    model = decoder(num_layers=1, dtype="bf16")
    save_model(model, tmp_path)
    assert dtypes(load_model(tmp_path)) == {torch.bfloat16}
    found = build_model(PretrainedModel(path=str(tmp_path), dtype=asked))
    assert dtypes(found) == {torch.bfloat16 if asked == "auto" else torch.float32}
    for one, other in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(one.float(), other.float())


def test_a_saved_model_of_transformers_keeps_its_dtype(tmp_path, bf16_folder):
    save_model(build_model(PretrainedModel(path=bf16_folder)), tmp_path)
    assert dtypes(load_model(tmp_path)) == {torch.bfloat16}


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_adapters_say_the_dtype_of_their_frozen_weights(tmp_path, bf16_folder, base):
    section = PretrainedModel(path=bf16_folder, adapter=AdapterConfig(base=base, r=2))
    model = build_model(section, seed=0)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16 if base == "bf16" else torch.float32}
    batch = TokenBatch(4, 32, 600).tensors()
    assert estimate(model, batch).peak_bytes == pytest.approx(allocator_peak(model, batch), rel=1e-3)
    save_model(model, tmp_path)
    (tmp_path / "config.yaml").write_text(
        json.dumps({"model": {"path": bf16_folder, "adapter": {"base": base, "r": 2}}})
    )
    read = load_model(tmp_path)
    assert torch.equal(read(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)


def test_two_dtypes_for_the_frozen_weights_are_refused():
    with pytest.raises(ConfigError, match="dtype fp32 and adapter are both set") as caught:
        parse_config({"model": {"path": "here", "dtype": "fp32", "adapter": {}}})
    assert "\n" not in str(caught.value)


@pytest.mark.keeps("step-bf16-weights-predicted")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("precision", "experts"), [("fp32", None), ("fp32", 4), ("bf16", None)])
def test_the_peak_of_a_step_on_bf16_weights_is_predicted(precision, experts):
    recipe = OptimizerRecipe(parse_config({}).training)
    model, batch = decoder(num_layers=1, dtype="bf16", num_experts=experts), token_batch(2, 32)
    found = estimate(model, batch, precision=precision, optimizer=recipe).peak_bytes
    measured = allocator_peak(model, batch, optimizer=recipe, settings=StepSettings(precision))
    assert found == pytest.approx(measured, rel=1e-3)


def moved(optimizer):
    """How many of a norm's weights, all 1, move in ten steps at a rate far below what bf16 resolves."""
    recipe = OptimizerRecipe(parse_config({"training": {"optimizer": optimizer, "learning_rate": 1e-4}}).training)
    weight = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
    made = recipe([weight])
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        made.step()
    return (weight != 1).sum().item()


@pytest.mark.keeps("checkpoint-loaded-own-dtype")
def test_adamw_on_bf16_weights_rounds_stochastically_so_that_small_updates_count():
    assert moved("adam") == 0
    assert moved("adamw") > 50


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        ("adamw", "updates are rounded stochastically"),
        ("adamw_bf16", "the 16 bits that bf16 leaves off are kept"),
        ("flash_adamw", "8 more bits are kept beside them"),
        ("muon", "muon rounds updates to nearest, which loses small ones; adamw does not"),
    ],
)
def test_a_note_says_what_becomes_of_small_updates(optimizer, line):
    assert line in str(rounding_note(decoder(num_layers=1, dtype="bf16"), optimizer))
    assert rounding_note(decoder(num_layers=1), optimizer) is None
