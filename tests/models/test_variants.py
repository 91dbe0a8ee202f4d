"""A model as another training would hold it, without memory: its bytes are those of the real one."""

import pytest
import torch

from tightfit import TokenBatch, estimate
from tightfit.errors import ConfigError
from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.models.loading import build_model, weights_dtype
from tightfit.models.variants import as_recipe
from tightfit.tracing.unbacked import is_unbacked
from tightfit.training.config import AdapterConfig, PretrainedModel, parse_config
from tiny import decoder
from tiny_adapters import saved_llama

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}


def bytes_of(model):
    """Bytes of weights, codes and scales."""
    held = list(model.parameters())
    return storage_bytes([*held, *(scale for p in held for scale in scales_of(p))])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_llama(tmp_path_factory.mktemp("llama"), **SHAPE)


@pytest.mark.keeps("model-recipe-holds-bytes")
def test_weights_in_another_dtype_take_its_bytes_and_no_memory():
    model = decoder(hidden_size=16, num_layers=2, vocab_size=64)
    count = sum(p.numel() for p in model.parameters())
    half = as_recipe(model, dtype="bf16")
    assert [p.nbytes for p in half.parameters()] == [p.nbytes // 2 for p in model.parameters()]
    assert all(is_unbacked(p) for p in half.parameters())
    assert bytes_of(as_recipe(model)) == bytes_of(model) == 4 * count
    assert bytes_of(as_recipe(half, dtype="fp32")) == 4 * count


@pytest.mark.keeps("model-recipe-holds-bytes")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("base", ["fp32", "bf16", "int8", "nf4"])
def test_adapters_on_a_base_take_the_bytes_of_the_real_ones(folder, base):
    adapter = AdapterConfig(r=2, base=base, target_modules="all-linear")
    real = build_model(PretrainedModel(path=str(folder), adapter=adapter), seed=0)
    dry = as_recipe(build_model(PretrainedModel(path=str(folder), dtype="fp32")), adapter=adapter)
    assert bytes_of(dry) == bytes_of(real)
    trained = [(n, tuple(p.shape), p.dtype) for n, p in dry.named_parameters() if p.requires_grad]
    assert trained == [(n, tuple(p.shape), p.dtype) for n, p in real.named_parameters() if p.requires_grad]
    assert trained
    found, batch = [], TokenBatch(2, 16, 300)
    for model in (real, dry):
        found.append(estimate(model, batch, precision="bf16", device="rtx4090").peak_bytes)
    assert found[0] == found[1]


def test_weights_kept_beside_few_bits_have_the_dtype_that_is_asked_for(folder):
    model = build_model(PretrainedModel(path=str(folder), dtype="fp32"))
    wide, narrow = (as_recipe(model, dtype=dtype, adapter=AdapterConfig(r=2, base="nf4")) for dtype in ("fp32", "bf16"))
    kept = [p for n, p in model.named_parameters() if "embed" in n or "norm" in n or "lm_head" in n]
    assert bytes_of(wide) - bytes_of(narrow) == storage_bytes(kept) // 2
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}


def test_a_configuration_names_the_dtype_beside_few_bits_and_no_other_one_beside_adapters(folder):
    settled = {"path": str(folder), "adapter": {"base": "nf4"}, "dtype": "bf16"}
    section = parse_config({"model": settled}).model
    assert weights_dtype(section) == "bf16"
    kept = {n: p.dtype for n, p in build_model(section).named_parameters() if "norm" in n}
    assert set(kept.values()) == {torch.bfloat16}
    with pytest.raises(ConfigError, match="adapter"):
        parse_config({"model": {**settled, "adapter": {"base": "bf16"}}})
