"""Tiny models of many architectures: estimated exactly, planned within the budget, verified bit-equal.

Some of each kind run here; `python benchmarks/zoo.py` runs every class that there is.
"""

import pytest
import transformers
from tiny_causal_lms import classes, tiny_batch, tiny_model

from tightfit import estimate, plan, verify
from tightfit.errors import CannotFit
from tightfit.models.published import published
from tiny import allocator_peak

OTHERS = (
    "Gemma3ForCausalLM",  # sliding windows, tied embeddings
    "MixtralForCausalLM",  # experts by grouped products
    "DeepseekV2ForCausalLM",  # latent attention, rotation by complex numbers
    "MambaForCausalLM",  # state space
    "Lfm2ForCausalLM",  # convolution and attention
    "FalconH1ForCausalLM",  # state space beside attention
)


def model_and_batch(name):
    if name != "T5ForConditionalGeneration":
        return tiny_model(name), tiny_batch(name)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    config = transformers.T5Config(**{**published()["t5-small"].config, **shape, "use_cache": False})
    return transformers.T5ForConditionalGeneration(config).train(), tiny_batch(name)


@pytest.mark.keeps("holds-dense-mixture-experts")
@pytest.mark.slow  # nine seconds
def test_an_encoder_with_a_decoder_is_estimated_planned_and_verified():
    check(*model_and_batch("T5ForConditionalGeneration"))


@pytest.mark.keeps("holds-dense-mixture-experts")
@pytest.mark.slow  # seven to fourteen seconds each
@pytest.mark.parametrize("name", OTHERS)
def test_an_architecture_is_estimated_planned_and_verified(name):
    check(*model_and_batch(name))


@pytest.mark.slow  # seven seconds for each of 181 classes
def test_every_class_is_estimated_planned_and_verified():
    failed, ran = {}, 0
    for name in classes():
        try:
            model, batch = model_and_batch(name)
            model(**batch)
        except Exception:
            continue  # not ours: the class wants a package or inputs that a language model does not have
        ran += 1
        try:
            check(model, batch)
        except Exception as error:
            failed[name] = str(error)
    assert ran >= 0.95 * len(classes())
    assert len(failed) <= 0.02 * ran, failed


def check(model, batch):
    found = estimate(model, batch)
    assert found.peak_bytes == pytest.approx(allocator_peak(model, batch), rel=0.001)
    try:
        made = plan(model, batch, "0.6x")
    except CannotFit as error:
        made = plan(model, batch, error.least_bytes)
    with made.apply(model):
        assert allocator_peak(model, batch) <= made.budget_bytes
    report = verify(model, batch, made)
    assert report.ok, str(report)
