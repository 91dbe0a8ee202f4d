"""Decoders as models of transformers, and back: equal logits, equal weights."""

import json
import os

import pytest
import torch
import transformers

from tightfit.errors import ModelError, OutputError
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.export import export_model, import_decoder, import_to
from tightfit.models.loading import build_model
from tightfit.models.saving import load_model
from tiny_adapters import SHAPE, adapted, saved_llama

IDS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
TINY = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300, "rope_theta": 5e5}
EXPERTS = {"num_experts": 4, "expert_intermediate_size": 48}
WINDOW = {"attention_window": 5}
CASES = [
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"activation": "geglu", "tie_embeddings": False, "norm_eps": 1e-5}),
    ("LlamaForCausalLM", {"activation": "geglu_tanh", "head_dim": 12}),
    ("MistralForCausalLM", WINDOW),
    ("Qwen3ForCausalLM", {"qk_norm": True}),
    ("Qwen3ForCausalLM", {"qk_norm": True, **WINDOW}),
    ("MixtralForCausalLM", EXPERTS),
    ("Qwen3MoeForCausalLM", {"qk_norm": True, "first_dense_layers": 1, "norm_topk": False, **EXPERTS}),
    ("LlamaForCausalLM", {"dtype": "bf16"}),
]


def model(**settings):
    """With weights that are far from their beginning."""
    torch.manual_seed(0)
    made = Decoder(DecoderConfig(**{**TINY, "max_position_embeddings": 64, **settings})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.dim() == 1))
    return made


def theirs(folder):
    found, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


@pytest.mark.keeps("exported-decoder-logits-run")
@pytest.mark.parametrize(("architecture", "settings"), CASES, ids=str)
def test_an_exported_decoder_has_equal_logits_and_comes_back_bit_for_bit(tmp_path, architecture, settings):
    ours = model(**settings)
    assert export_model(ours, tmp_path / "out", end_of_text=7) == architecture
    exported = theirs(tmp_path / "out")
    assert type(exported).__name__ == architecture
    with torch.no_grad():
        one, other = ours(IDS).logits, exported(input_ids=IDS).logits
    assert exported.dtype == one.dtype
    if "attention_window" in settings:  # by tiles here, by a mask over all pairs there
        assert (one - other).abs().max() < 1e-5 * one.abs().max()
    elif "dtype" in settings:  # transformers rounds the angles to bf16
        assert (one - other).abs().max() < 0.05 * one.abs().max()
    else:
        assert torch.equal(one, other)
    back = import_decoder(tmp_path / "out")
    assert ours.state_dict().keys() == back.state_dict().keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, back.state_dict()[name]), name
        assert weight.dtype == back.state_dict()[name].dtype
    assert torch.equal(back(IDS).logits, one)


def test_what_ends_a_generation_is_written(tmp_path):
    export_model(model(), tmp_path / "out", end_of_text=7)
    assert theirs(tmp_path / "out").generation_config.eos_token_id == 7


@pytest.mark.keeps("exported-decoder-logits-run")
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"conv_kernel": 3, "attention_every": 2}, r"model\.conv_kernel 3: no layout that export writes has a block"),
        ({"num_shared_experts": 1, **EXPERTS}, r"model\.num_shared_experts 1: no layout"),
        ({"norm_topk": False, **EXPERTS}, r"model\.norm_topk false: no layout"),
        ({"first_dense_layers": 1, **EXPERTS}, r"model\.first_dense_layers 1: no layout"),
    ],
)
def test_a_shape_that_no_architecture_has_is_refused_by_its_key_and_nothing_is_written(tmp_path, settings, line):
    with pytest.raises(ModelError, match=line) as caught:
        export_model(model(**settings), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.keeps("export-complete-touches-folder")
def test_a_folder_with_files_is_refused_and_an_empty_one_is_not(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(OutputError, match="is not an empty folder"):
        export_model(model(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]
    (tmp_path / "empty").mkdir()
    export_model(model(), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.keeps("export-complete-touches-folder")
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("model.safetensors"):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device: make room"):
        export_model(model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_files_are_written_with_the_usual_permissions(tmp_path):
    export_model(model(), tmp_path / "out")
    probe = tmp_path / "probe"
    probe.touch()
    probe_folder = tmp_path / "folder"
    probe_folder.mkdir()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {probe.stat().st_mode}
    assert (tmp_path / "out").stat().st_mode == probe_folder.stat().st_mode


def test_adapters_are_merged(tmp_path):
    trained = adapted(saved_llama(tmp_path / "base"), r=4).eval()
    with torch.no_grad():
        before = trained(input_ids=IDS).logits
    export_model(trained, tmp_path / "out")
    with torch.no_grad():
        found = theirs(tmp_path / "out")(input_ids=IDS).logits
    assert torch.allclose(found, before, atol=1e-5)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True


def test_adapters_on_weights_in_few_bits_are_refused(tmp_path):
    trained = adapted(saved_llama(tmp_path / "base"), r=4, base="int8")
    with pytest.raises(ModelError, match="cannot be merged: use the run's folder with peft"):
        export_model(trained, tmp_path / "out")


def test_a_model_of_transformers_becomes_a_decoder_that_can_be_trained_on(tmp_path):
    from tightfit.training.config import PretrainedModel

    torch.manual_seed(0)
    source = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    source.save_pretrained(tmp_path / "llama")
    import_to(tmp_path / "llama", tmp_path / "decoder")
    ours = load_model(tmp_path / "decoder")
    assert isinstance(ours, Decoder)
    with torch.no_grad():
        assert torch.equal(ours(IDS).logits, source(input_ids=IDS).logits)
    assert isinstance(build_model(PretrainedModel(path=str(tmp_path / "decoder"))), Decoder)


@pytest.mark.keeps("exported-decoder-logits-run")
@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias True: the decoder has False only"),
        ("Llama", {"hidden_act": "relu"}, "hidden_act 'relu' is none of"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types"),
        ("Qwen3Moe", {"mlp_only_layers": [1], "num_experts": 4, "moe_intermediate_size": 48}, "mlp_only_layers"),
        ("GPT2", {}, "model_type 'gpt2' is none of llama, mistral"),
    ],
)
def test_a_model_that_no_decoder_computes_is_refused_by_its_key(tmp_path, kind, keys, line):
    shape = {} if kind == "GPT2" else SHAPE
    getattr(transformers, f"{kind}Config")(**shape, **keys).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=line) as caught:
        import_decoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_or_left_over_are_named(tmp_path):
    export_model(model(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"the weight model\.layers\.2\.\S+ is not there"):
        import_decoder(tmp_path / "out")
    path.write_text(json.dumps({**raw, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"no place for the weight model\.layers\.1"):
        import_decoder(tmp_path / "out")
