"""Frozen weights in 8 and 4 bits stand for the weights they were made of, and the layers compute with just those."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from torch import nn

from tightfit import estimate
from tightfit.errors import ModelError
from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.ops.weights.low_bit import at_full_width, freeze_in_low_bits, linear_layers
from tiny import allocator_peak, decoder, token_batch


@pytest.fixture(params=["int8", "nf4"])
def kind(request):
    return request.param


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def bytes_of(model):
    parameters = list(model.parameters())
    return storage_bytes([*parameters, *(scale for p in parameters for scale in scales_of(p))])


@pytest.mark.keeps("weights-8-bits-nf4")
def test_codes_are_near_the_weights_and_take_the_bytes_that_they_should(kind):
    model = Pair()
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    freeze_in_low_bits(model, kind)
    # int8: a byte a weight and an fp32 scale a row; nf4: half a byte, an fp32 scale for 64, and a table of 16 a layer.
    count, rows, biases = 2 * 64 * 96, 96 + 64, 96
    expected = count + 4 * rows if kind == "int8" else count // 2 + 4 * count // 64 + 2 * 16 * 4
    assert bytes_of(model) == expected + 4 * biases
    wide = dict(at_full_width(copy.deepcopy(model)).named_parameters())
    step = 0.5 / 127 if kind == "int8" else 0.304  # of the largest weight: half a step; NF4's widest, from -1 to -0.696
    for name, weight in full.items():
        assert (wide[name] - weight).abs().max() <= 1.001 * step * weight.abs().max()
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.keeps("weights-8-bits-nf4")
def test_a_layer_computes_with_its_weight_at_full_width_and_hands_on_the_gradient(kind):
    model, x = Pair(), torch.randn(5, 64, requires_grad=True)
    freeze_in_low_bits(model, kind)
    wide = at_full_width(copy.deepcopy(model))
    outputs = [m(x) for m in (model, wide)]
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in outputs]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


def test_under_autocast_a_layer_computes_in_its_dtype(kind):
    model = Pair()
    freeze_in_low_bits(model, kind)
    before = [p.clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 64)).dtype == torch.bfloat16
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_evaluation_between_two_steps_changes_nothing(kind):
    model, x = Pair(), torch.randn(5, 64, requires_grad=True)
    freeze_in_low_bits(model, kind)
    first = torch.autograd.grad(model.train()(x).sum(), x)[0]
    with torch.no_grad():
        model.eval()(x)
    assert torch.equal(torch.autograd.grad(model.train()(x).sum(), x)[0], first)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_the_same(kind, duplicate):
    model, x = Pair(), torch.randn(5, 64)
    freeze_in_low_bits(model, kind)
    assert torch.equal(duplicate(model)(x), model(x))


def test_the_head_keeps_its_weights():
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    names = linear_layers(transformers.LlamaForCausalLM(config))
    assert len(names) == 7
    assert not any("lm_head" in name for name in names)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ModelError, match="Embedding has no linear layers but its head"):
        freeze_in_low_bits(nn.Embedding(3, 4), "nf4")


def test_a_model_at_full_width_already_is_left_as_it_is():
    model = decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in at_full_width(model).named_parameters())


def test_a_base_that_the_user_quantised_by_torchao_is_predicted_and_widened():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own import
        from torchao import quantization
    model, x = decoder(), token_batch()
    model.requires_grad_(False)
    quantization.quantize_(model.layers, quantization.Int8WeightOnlyConfig())
    model.norm.requires_grad_(True)
    assert estimate(model, x).peak_bytes == pytest.approx(allocator_peak(model, x), rel=1e-4)
    with torch.no_grad():
        narrow = model(**x).loss
        assert torch.allclose(at_full_width(model)(**x).loss, narrow, rtol=1e-5)
    assert all(type(p.data) is torch.Tensor for p in model.parameters())
