"""A decoder in which some blocks have a short convolution in the place of attention."""

import pytest
import torch
import torch.nn.functional as F

from tightfit import estimate, recompute, score
from tightfit.errors import ModelError
from tightfit.models.convolution import ShortConvolution
from tightfit.models.decoder import DecoderConfig
from tightfit.models.generation import generate
from tightfit.models.own import load_decoder, save_decoder
from tiny import allocator_peak, decoder, token_batch

HYBRID = {"num_layers": 3, "hidden_size": 32, "conv_kernel": 3, "attention_every": 3}


def ids(rows, length, seed=0):
    return torch.randint(0, 600, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_last_of_every_so_many_blocks_has_attention():
    kinds = [hasattr(layer, "attention") for layer in decoder(**{**HYBRID, "num_layers": 6}).layers]
    assert kinds == [False, False, True, False, False, True]


def test_it_is_the_gated_depthwise_convolution_of_pytorch():
    layer, x = ShortConvolution(DecoderConfig(hidden_size=16, num_heads=2, conv_kernel=4, attention_every=2)), None
    x = torch.randn(2, 9, 16)
    before, after, value = layer.in_proj(x).chunk(3, dim=-1)
    padded = F.pad((before * value).mT, (3, 0))
    expected = layer.o_proj(after * F.conv1d(padded, layer.taps, groups=16).mT)
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_a_position_sees_as_many_before_it_as_the_kernel_says_and_none_after_it():
    layer = ShortConvolution(DecoderConfig(hidden_size=16, num_heads=2, conv_kernel=4, attention_every=2))
    x = torch.randn(1, 12, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0, 7].square().sum(), x)
    assert gradient[0].abs().sum(dim=-1).nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.keeps("packed-document-logits-gradients")
def test_a_packed_document_sees_no_other():
    model, document = decoder(**{**HYBRID, "attention_every": 4}), ids(1, 11)[0]  # no block with attention
    places = torch.cat([torch.arange(n) for n in (2, 5, 11, 6)])[None]
    found = []
    for seed in (1, 2):
        row = torch.cat([ids(1, 7, seed)[0], document, ids(1, 6, seed)[0]])[None]
        found.append(model(row, position_ids=places).logits[:, 7:18])
    assert torch.equal(*found)
    assert torch.allclose(found[0], model(document[None]).logits, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"attention_window": 6}, {"num_experts": 4}], ids=str)
def test_reading_in_pieces_with_a_cache_is_reading_at_once(settings):
    model, text = decoder(**HYBRID, **settings).eval(), ids(2, 40)
    whole = score(model, text, chunk_size=None).log_likelihoods
    for size in (1, 2, 7):
        assert torch.allclose(score(model, text, chunk_size=size).log_likelihoods, whole, atol=1e-4)
    cached = generate(model, text[:, :10], max_new_tokens=8, temperature=0, chunk_size=4)
    grown = text[:, :10]
    with torch.no_grad():
        for _ in range(8):
            grown = torch.cat((grown, model(grown).logits[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(cached, grown)


@pytest.mark.keeps("short-convolution-step-packed")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("packed", [False, True])
def test_its_peak_is_predicted_and_recompute_changes_no_bit(packed):
    model, data = decoder(**HYBRID), token_batch(3, 48)
    if packed:
        data["position_ids"] = torch.arange(48).remainder(20).repeat(3, 1)
    assert estimate(model, data).peak_bytes == pytest.approx(allocator_peak(model, data), rel=1e-3)
    model(**data).loss.backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    with recompute(model, "layers.*"):
        model(**data).loss.backward()
    for name, parameter in model.named_parameters():
        assert plain[name].abs().sum() > 0, name
        assert torch.equal(plain[name], parameter.grad), name


def test_it_is_saved_and_read_back(tmp_path):
    model = decoder(**HYBRID)
    save_decoder(model, tmp_path)
    assert torch.equal(load_decoder(tmp_path)(ids(1, 9)).logits, model(ids(1, 9)).logits)


def test_half_a_choice_is_refused():
    with pytest.raises(ModelError, match=r"model\.attention_every 2 leaves blocks without attention"):
        DecoderConfig(attention_every=2)
    with pytest.raises(ModelError, match=r"model\.conv_kernel 3 has no block to stand in"):
        DecoderConfig(conv_kernel=3)
