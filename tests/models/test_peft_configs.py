"""Any adapters of peft, by the JSON of their configuration: predicted as measured, and planned bit by bit."""

import json

import peft
import pytest
import torch
import transformers
import yaml

from command_line import mistake, tightfit
from tightfit import TokenBatch, estimate
from tightfit.errors import ConfigError, ModelError
from tightfit.models.adapters import add_adapter
from tightfit.models.loading import build_model
from tightfit.recipes.lines import lines_for
from tightfit.recipes.records import Recipe
from tightfit.training.config import AdapterConfig, PretrainedModel, parse_config
from tiny import allocator_peak, demand_exact_plan
from tiny_adapters import saved_llama

ALL = ["q_proj", "v_proj", "down_proj"]
CONFIGS = {
    "lora": peft.LoraConfig(r=4, target_modules=ALL),
    "dora": peft.LoraConfig(r=4, target_modules=ALL, use_dora=True),
    "rslora": peft.LoraConfig(r=4, target_modules=ALL, use_rslora=True, lora_dropout=0.1),
    "pissa": peft.LoraConfig(r=4, target_modules=ALL, init_lora_weights="pissa"),
    "some layers": peft.LoraConfig(r=4, target_modules=ALL, layers_to_transform=[0, 2]),
    "saved modules": peft.LoraConfig(r=4, target_modules=ALL, modules_to_save=["norm"]),
    "vera": peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"]),
    "ia3": peft.IA3Config(target_modules=ALL, feedforward_modules=["down_proj"]),
    "adalora": peft.AdaLoraConfig(target_modules=ALL, init_r=4, target_r=2, total_step=10),
    "oft": peft.OFTConfig(target_modules=["q_proj", "v_proj"], oft_block_size=16),
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
}
IDS = TokenBatch(4, 48, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"))


def written(config, folder, **base):
    config.save_pretrained(folder)
    return AdapterConfig(config=str(folder / "adapter_config.json"), **base)


def adapted(folder, section):
    torch.manual_seed(1)
    return build_model(PretrainedModel(path=str(folder), adapter=section), seed=1).train()


@pytest.mark.keeps("any-peft-config")
@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_its_peak_is_predicted_and_a_plan_changes_no_bit(folder, tmp_path, name):
    model, batch = adapted(folder, written(CONFIGS[name], tmp_path)), IDS.tensors()
    found = estimate(model, batch)
    assert found.peak_bytes == pytest.approx(allocator_peak(model, batch), rel=1e-3)
    demand_exact_plan(model, batch, "0.85x")


@pytest.mark.keeps("any-peft-config")
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_it_stands_on_a_base_in_few_bits(folder, tmp_path, base):
    model = adapted(folder, written(CONFIGS["dora"] if base == "nf4" else CONFIGS["rslora"], tmp_path, base=base))
    batch = IDS.tensors()
    assert estimate(model, batch).peak_bytes == pytest.approx(allocator_peak(model, batch), rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vera", "saved modules", "some layers"])
def test_it_is_what_peft_makes_of_it(folder, tmp_path, name):
    model = adapted(folder, written(CONFIGS[name], tmp_path))
    torch.manual_seed(1)
    theirs = peft.get_peft_model(
        build_model(PretrainedModel(path=str(folder), dtype="fp32")), peft.PeftConfig.from_pretrained(tmp_path)
    )
    ours = {path: p.shape for path, p in model.named_parameters() if p.requires_grad}
    assert ours == {path: p.shape for path, p in theirs.named_parameters() if p.requires_grad}


def test_a_file_without_layers_or_a_type_is_a_lora_on_the_usual_ones(folder, tmp_path):
    (path := tmp_path / "own.json").write_text('{"r": 3}')
    trained = [n for n, p in adapted(folder, AdapterConfig(config=str(path))).named_parameters() if p.requires_grad]
    assert {name.split(".")[-4] for name in trained} == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("[1]", "it holds no mapping of keys"),
        ("{", "Expecting property name"),
        ('{"peft_type": "LORO"}', "no adapters of peft_type LORO"),
        ('{"rank": 4}', "LoraConfig has no rank"),
        ('{"target_module": ["q_proj"]}', "did you mean target_modules"),
        ('{"target_modules": ["nope"]}', "are none of the model's linear layers"),
    ],
)
def test_what_holds_no_adapters_is_one_line(folder, tmp_path, text, reason):
    path = tmp_path / "own.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelError, match=r"model\.adapter") as caught:
        add_adapter(build_model(PretrainedModel(path=str(folder))), AdapterConfig(config=str(path)))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Whisper", "ViT"])
def test_prompts_are_refused_where_a_model_reads_no_tokens(tmp_path, kind):
    small = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1, "vocab_size": 60}
    config = getattr(transformers, f"{kind}Config")(**small, pad_token_id=0)
    model = getattr(transformers, f"{kind}{'Model' if kind == 'ViT' else 'ForConditionalGeneration'}")(config)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 6}))
    with pytest.raises(ModelError, match=rf"adapter_config\.json: PROMPT_TUNING goes before tokens, which {kind}"):
        add_adapter(model, AdapterConfig(config=str(path)))


def test_a_file_stands_in_the_place_of_all_keys_but_the_base():
    with pytest.raises(ConfigError, match=r"config a.json and r are both set"):
        parse_config({"model": {"path": "x", "adapter": {"config": "a.json", "r": 4}}})
    assert parse_config({"model": {"path": "x", "adapter": {"config": "a.json", "base": "nf4"}}}).model.adapter


@pytest.mark.keeps("any-peft-config")
def test_the_command_line_takes_the_file(folder, tmp_path):
    path = written(CONFIGS["ia3"], tmp_path).config
    asked = ("estimate", "--model", folder, "--seq-len", 32, "--device", "rtx4090", "--json")
    found = json.loads(tightfit(*asked, "--adapter", path, "--base", "bf16").out)
    assert found["adapted"] == ["down_proj", "q_proj", "v_proj"]
    assert "No such file" in mistake(*asked, "--adapter", tmp_path / "nope.json")


def test_lines_to_copy_name_the_file():
    lines = lines_for(Recipe(), Recipe(adapter=AdapterConfig(config="a.json", base="nf4")), budget="1GiB")
    assert lines.flags == "--adapter a.json --base nf4"
    assert yaml.safe_load(lines.yaml)["model"]["adapter"] == {"config": "a.json", "base": "nf4"}
