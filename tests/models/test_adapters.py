"""Low-rank adapters on a frozen base: predicted as measured, planned bit-equal, saved as peft does."""

import sys
import warnings

import pytest
import torch
import transformers

from tightfit import TokenBatch, estimate, plan, recompute, verify
from tightfit.cli import sources
from tightfit.errors import ConfigError, InputError, ModelError
from tightfit.models.adapters import add_adapter, usual_layers
from tightfit.models.loading import build_model
from tightfit.models.published import published
from tightfit.models.saving import load_model, save_model
from tightfit.planner.levers import ChunkedLoss
from tightfit.recipes.neighbours import layers_to_adapt
from tightfit.step import StepSettings
from tightfit.training.config import AdapterConfig, PretrainedModel, parse_config
from tiny import allocator_peak, decoder
from tiny_adapters import adapted, saved_llama

BASES = ("fp32", "int8", "nf4")
BLOCKS = "base_model.model.model.layers.*"
IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.keeps("low-rank-adapters-frozen")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("precision", "dropout", "budget"), [("fp32", 0.1, "0.6x"), ("bf16", 0.0, "0.8x")])
def test_the_predicted_peaks_are_the_allocators_and_the_plan_changes_no_bit(folder, base, precision, dropout, budget):
    model, batch = adapted(folder, base=base, r=4, dropout=dropout), TokenBatch(4, 64, 600).tensors()
    settings = StepSettings(precision)
    made = plan(model, batch, budget, precision=precision)
    assert verify(model, batch, made).ok
    assert made.plain_peak_bytes == pytest.approx(allocator_peak(model, batch, settings=settings), rel=1e-4)
    with made.apply(model):
        assert made.peak_bytes == pytest.approx(allocator_peak(model, batch, settings=settings), rel=1e-4)


@pytest.mark.keeps("low-rank-adapters-frozen")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_that_is_widened_for_its_product_is_counted(tmp_path, base, precision):
    model = adapted(saved_llama(tmp_path, intermediate_size=2048, num_hidden_layers=1, vocab_size=40), base=base, r=1)
    batch = TokenBatch(1, 4, 40).tensors()
    found = estimate(model, batch, precision=precision)
    assert found.peak_bytes == pytest.approx(allocator_peak(model, batch, settings=StepSettings(precision)), rel=1e-3)


@pytest.mark.keeps("low-rank-adapters-frozen")
def test_frozen_weights_have_neither_gradients_nor_states(folder):
    model = adapted(folder, r=4)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    steps = sum(4 for p in model.parameters() if p.requires_grad)
    found = estimate(model, TokenBatch(4, 64, 600))
    assert found.by_category["optimizer states"] == 2 * trained + steps
    assert 0 < max(found.step_figures.timeline["gradients"]) <= trained


@pytest.mark.keeps("low-rank-adapters-frozen")
@pytest.mark.slow  # a plan for each budget
@pytest.mark.parametrize("base", BASES)
def test_recompute_never_takes_more_than_the_plain_step_where_weights_are_frozen(folder, base):
    model, batch = adapted(folder, base=base), TokenBatch(4, 64, 600)
    plain = estimate(model, batch).peak_bytes
    for pattern in (BLOCKS, f"{BLOCKS}.mlp", f"{BLOCKS}.self_attn", f"{BLOCKS}.self_attn.q_proj"):
        with recompute(model, pattern):
            assert estimate(model, batch).peak_bytes <= plain
    peaks = [plan(model, batch, f"{share}x").peak_bytes for share in (0.95, 0.8, 0.65)]
    assert peaks == sorted(peaks, reverse=True)
    assert max(peaks) < plain


@pytest.mark.slow  # plans, and proves gradients
@pytest.mark.parametrize("base", ["fp32", "nf4"])
def test_a_chunked_loss_on_adapters_is_proved(folder, base):
    model, batch = adapted(folder, base=base), TokenBatch(4, 64, 600).tensors()
    made = plan(model, batch, "0.5x", levers="rounding")
    report = verify(model, batch, made)
    assert made.micro_batches > 1 or made.lever(ChunkedLoss) is not None
    assert report.ok, str(report)
    assert report.planned_error is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", BASES)
def test_a_model_too_large_to_be_there_is_estimated_with_its_adapters(folder, base):
    from tightfit.tracing.build import build_dry

    section = PretrainedModel(path=str(folder), adapter=AdapterConfig(base=base))
    dry = build_dry(lambda: build_model(section.model_copy(update={"random_init": True})))
    batch = TokenBatch(4, 64, 600)
    assert estimate(dry, batch).peak_bytes == estimate(build_model(section), batch).peak_bytes


@pytest.mark.keeps("adapters-saved-peft-format")
def test_adapters_alone_are_saved_and_peft_reads_them(folder, tmp_path):
    import peft
    import transformers

    model = adapted(folder).eval()
    save_model(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name that it has changed
        base = transformers.LlamaForCausalLM.from_pretrained(folder)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert torch.equal(load_model(tmp_path)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_saved_adapter_can_be_trained_on(folder, tmp_path):
    save_model(adapted(folder), tmp_path)
    model = load_model(tmp_path)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }


def test_an_adapter_of_another_model_is_refused_by_its_folder(folder, tmp_path):
    save_model(adapted(folder), tmp_path / "run")
    saved_llama(tmp_path / "wide", hidden_size=32)
    config = tmp_path / "run" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(folder), str(tmp_path / "wide")))
    with pytest.raises(ModelError, match="does not hold adapters of this model") as caught:
        load_model(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_layers_that_the_model_does_not_have_are_answered_with_those_that_it_has(folder):
    with pytest.raises(ModelError, match=r"target_modules .*wrong.* are none of .*down_proj.*q_proj") as caught:
        adapted(folder, target_modules=("wrong",))
    assert "\n" not in str(caught.value)


def numbered():
    """Three blocks whose layers have numbers as names, as the blocks have."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)) for _ in range(3)]
    return torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Sequential(*blocks))


def test_a_name_that_means_more_than_linear_layers_is_one_line_without_the_module():
    with pytest.raises(ModelError, match=r"target_modules name a Sequential, which is no linear layer") as caught:
        add_adapter(numbered(), AdapterConfig(target_modules=("0", "1")))
    assert len(str(caught.value)) < 200


def test_ways_out_adapt_layers_whose_names_are_numbers():
    model = numbered()
    targets = layers_to_adapt(model, None)
    assert isinstance(targets, tuple)
    found = add_adapter(model, AdapterConfig(target_modules=targets))
    assert sum("lora_A" in name for name, _ in found.named_parameters()) == 6


def test_a_model_that_peft_has_no_layers_in_mind_for_must_name_them():
    own = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(2, 2)})
    with pytest.raises(ModelError, match=r"no layers in mind for ModuleDict: name some in target_modules .*gate_proj"):
        add_adapter(own, AdapterConfig())
    model = add_adapter(decoder(), AdapterConfig(target_modules=("q_proj", "v_proj")))
    assert sum(p.requires_grad for p in model.parameters()) == 3 * 2 * 2


def test_the_reference_decoder_gets_adapters_on_all_its_linear_layers_but_the_head():
    trained = [p for p, weight in add_adapter(decoder(), AdapterConfig()).named_parameters() if weight.requires_grad]
    assert {path.split(".")[-4] for path in trained} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_a_model_of_transformers_that_peft_does_not_know_gets_adapters_on_all_its_linear_layers():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, vocab_size=32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert usual_layers(model) == ("k_proj", "o_proj", "q_proj", "v_proj")  # its experts are no linear layers
    adapted = {path for path, _ in add_adapter(model, AdapterConfig(r=2)).named_parameters() if "lora_A" in path}
    assert {path.split(".")[-4] for path in adapted} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any("lm_head" in path for path in adapted)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"adapter": {"r": 4}}, "model.adapter applies only beside model.path"),
        ({"path": "x", "adapter": {"rank": 4}}, "unknown key model.adapter.rank"),
        ({"path": "x", "adapter": {"target_module": "q_proj"}}, "did you mean model.adapter.target_modules?"),
        ({"path": "x", "adapter": {"base": "int4"}}, "model.adapter.base is 'int4' (text), wanted 'fp32', 'bf16'"),
        ({"path": "x", "adapter": {}, "random_init": True}, "adapter and random_init are both set"),
    ],
)
def test_a_wrong_adapter_section_is_told_in_one_line(section, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": section}, source="run.yaml")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_sets_one_key_of_the_adapter():
    config = parse_config({"model": {"path": "x", "adapter": {"r": 4}}}, ["model.adapter.target_modules=[q_proj]"])
    assert isinstance(config.model, PretrainedModel)
    assert config.model.adapter == AdapterConfig(r=4, target_modules=("q_proj",))


@pytest.mark.parametrize(
    ("package", "base", "command"),
    [("peft", "fp32", "hf"), ("bitsandbytes", "nf4", "lowbit")],
)
def test_a_missing_package_is_told_with_the_command_that_installs_it(folder, monkeypatch, package, base, command):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"pip install 'tightfit\[{command}\]'"):
        adapted(folder, base=base)


SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60, "pad_token_id": 0}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SPEECH = {**SMALL, **HEADS, "num_mel_bins": 8, "decoder_start_token_id": 1, "use_cache": False}
OF_IMAGES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CAPTIONS = (
    transformers.ViTConfig(**OF_IMAGES, image_size=16, patch_size=8),
    transformers.BertConfig(**OF_IMAGES, vocab_size=60),
)
READERS = {
    "whisper": (
        transformers.WhisperForConditionalGeneration,
        transformers.WhisperConfig(**SPEECH, max_source_positions=20, max_target_positions=20),
        {"input_features": torch.zeros(2, 8, 40)},
    ),
    "speech to text": (
        transformers.Speech2TextForConditionalGeneration,
        transformers.Speech2TextConfig(**SPEECH, input_feat_per_channel=8, conv_channels=32),
        {"input_features": torch.zeros(2, 40, 8)},
    ),
    "captions": (
        transformers.VisionEncoderDecoderModel,
        transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            *CAPTIONS, decoder_start_token_id=1, pad_token_id=0
        ),
        {"pixel_values": torch.zeros(2, 3, 16, 16)},
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=60, decoder_start_token_id=0
        ),
        {"input_ids": IDS},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.keeps("adapters-default-layers")
@pytest.mark.parametrize("name", READERS)
def test_adapters_go_on_models_of_sounds_and_images_too(name):
    made, config, batch = READERS[name]
    torch.manual_seed(0)
    model = add_adapter(made(config).train(), AdapterConfig(r=2, target_modules=("q_proj", "query", "q")))
    batch = {**batch, "labels": IDS}
    planned = plan(model, batch, "0.99x")
    assert planned.plain_peak_bytes == pytest.approx(allocator_peak(model, batch), rel=1e-3)
    assert verify(model, batch, planned).ok
    assert model.peft_type == "LORA"
    assert (model.active_peft_config.task_type == "SEQ_2_SEQ_LM") == (name == "t5")


def one_of_each_architecture():
    """The smallest model of each architecture among those known by name."""
    known = sorted(published().items(), key=lambda item: item[1].parameters)
    known = [(name, entry) for name, entry in known if not entry.is_denoiser]
    return list({entry.config["model_type"]: name for name, entry in reversed(known)}.values())


@pytest.mark.keeps("adapters-default-layers")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", one_of_each_architecture())
def test_every_architecture_has_layers_for_adapters(name):
    model = sources.build(name, dry=True, held=sources.HeldAs(adapter=AdapterConfig(r=1))).model
    trained = [path for path, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(".lora_" in path for path in trained)
    assert not any(".experts.lora_" in path for path in trained)  # each would exist once more at full width
