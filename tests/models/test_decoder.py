import copy

import pytest
import torch
import torch.nn.functional as F

from tightfit.models.decoder import PRESETS, Decoder, DecoderConfig, RMSNorm, RotaryTable, next_token_loss, rotate

TINY = DecoderConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50, max_position_embeddings=32
)


def varied(**changes):
    return DecoderConfig(**{**TINY.__dict__, **changes})


def tokens(rows=2, length=12, seed=0):
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def built(config, seed=0):
    torch.manual_seed(seed)
    return Decoder(config)


def parameters(config):
    return sum(parameter.numel() for parameter in Decoder(config).parameters())


def test_loss_is_a_scalar_only_with_labels_and_logits_cover_the_vocabulary():
    model, ids = built(TINY), tokens()
    assert model(ids).loss is None
    output = model(input_ids=ids, labels=ids)
    assert output.logits.shape == (2, 12, 50)
    assert output.loss.shape == ()


def test_an_untrained_model_is_as_good_as_a_uniform_guess():
    ids = tokens(rows=8, length=32)
    assert built(TINY)(ids, ids).loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.05)


def test_the_loss_is_cross_entropy_of_each_position_against_the_next_label():
    logits, labels = torch.randn(2, 6, 9), torch.randint(0, 9, (2, 6))
    labels[0, 3] = -100
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 9), labels[:, 1:].reshape(-1))
    assert torch.allclose(next_token_loss(logits, labels), expected)


def test_losses_of_ragged_micro_batches_add_up_where_they_share_one_divisor():
    model, ids = built(TINY), tokens(rows=4)
    labels = ids.clone()
    labels[0, 3:] = -100
    count = (labels[:, 1:] != -100).sum()
    parts = [model(ids[rows], labels[rows], num_items_in_batch=count).loss for rows in (slice(0, 1), slice(1, 4))]
    assert torch.allclose(sum(parts), model(ids, labels).loss)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"num_kv_heads": None},
        {"activation": "geglu"},
        {"head_dim": 6},
        {"tie_embeddings": False},
    ],
)
def test_a_position_sees_nothing_after_it_and_everything_before_it(changes):
    model, ids = built(varied(**changes)).eval(), tokens()
    later, earlier = ids.clone(), ids.clone()
    later[:, 7] += 1
    earlier[:, 0] += 1
    plain = model(ids % 50).logits
    assert torch.equal(plain[:, :7], model(later % 50).logits[:, :7])
    assert not torch.allclose(plain[:, -1], model(earlier % 50).logits[:, -1])


def test_every_parameter_of_every_variant_gets_a_gradient():
    for changes in ({}, {"qk_norm": True}, {"activation": "geglu_tanh"}, {"tie_embeddings": False}):
        model, ids = built(varied(**changes)), tokens()
        model(ids, ids).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_the_activations_differ_as_their_names_say():
    x = torch.randn(2, 3, 32)
    mlp = {name: built(varied(activation=name)).layers[0].mlp for name in ("swiglu", "geglu", "geglu_tanh")}
    gate, up = mlp["swiglu"].gate_proj(x), mlp["swiglu"].up_proj(x)
    down = mlp["swiglu"].down_proj
    assert torch.equal(mlp["swiglu"](x), down(F.silu(gate) * up))
    assert torch.equal(mlp["geglu"](x), down(F.gelu(gate) * up))
    assert torch.equal(mlp["geglu_tanh"](x), down(F.gelu(gate, approximate="tanh") * up))


def test_the_norm_is_the_formula():
    norm, x = RMSNorm(16, eps=1e-6), torch.randn(3, 16)
    norm.weight.data = torch.randn(16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    assert torch.allclose(norm(x), expected, atol=1e-6)


def test_rotated_queries_and_keys_know_only_their_distance():
    cos, sin = RotaryTable(TINY)(32)
    q, k = torch.randn(2, 8), torch.randn(2, 8)
    queries = rotate(q[None, :, None].expand(1, 2, 32, 8), cos, sin)
    keys = rotate(k[None, :, None].expand(1, 2, 32, 8), cos, sin)
    scores = queries @ keys.transpose(-1, -2)
    assert torch.allclose(scores[..., 5, 3], scores[..., 29, 27], atol=1e-5)
    assert not torch.allclose(scores[..., 5, 3], scores[..., 5, 4])
    assert torch.allclose(queries.norm(dim=-1), q.norm(dim=-1)[None, :, None].expand(1, 2, 32), atol=1e-5)


def test_tied_embeddings_are_one_parameter_and_untied_ones_two():
    tied = built(TINY)
    assert tied.head.weight is tied.embedding.weight
    assert parameters(varied(tie_embeddings=False)) - parameters(TINY) == 50 * 32


def test_dropout_acts_in_training_only_and_is_reproducible_by_seed():
    model, ids = built(varied(dropout=0.5, attention_dropout=0.5)), tokens()
    torch.manual_seed(1)
    first = model(ids).logits
    assert not torch.equal(first, model(ids).logits)
    torch.manual_seed(1)
    assert torch.equal(first, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_what_adds_to_the_stream_starts_smaller_with_depth():
    deep = built(varied(num_layers=8, hidden_size=64))
    ratio = deep.layers[0].attention.q_proj.weight.std() / deep.layers[0].attention.o_proj.weight.std()
    assert ratio.item() == pytest.approx(4.0, rel=0.1)


def test_bf16_autocast_gives_nearly_the_loss_of_fp32():
    model, ids = built(TINY), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(ids, ids).loss
    assert torch.allclose(mixed.float(), model(ids, ids).loss, rtol=1e-2)


def test_a_copy_computes_the_same_and_the_tables_are_not_saved():
    model, ids = built(TINY), tokens()
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
    assert not any("rotary" in key for key in model.state_dict())


def test_presets_have_the_sizes_of_their_names():
    with torch.device("meta"):
        assert parameters(DecoderConfig(**PRESETS["cpu26"])) == pytest.approx(26e6, rel=0.02)
        assert parameters(DecoderConfig(**PRESETS["mm104"])) == pytest.approx(104e6, rel=0.05)


@pytest.mark.parametrize(("hidden_size", "width"), [(256, 704), (512, 1408), (768, 2048)])
def test_the_gated_width_is_eight_thirds_rounded_up_to_64(hidden_size, width):
    assert DecoderConfig(hidden_size=hidden_size).mlp_width == width


@pytest.mark.parametrize("changes", [{"attention": "chunked", "attention_chunk_size": 5}, {"mlp": "low_memory"}])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
def test_the_low_memory_variants_compute_the_same(changes, activation):
    plain, frugal = built(varied(activation=activation)), built(varied(activation=activation, **changes))
    ids = tokens()
    for model in (plain, frugal):
        model(ids, ids).loss.backward()
    assert torch.allclose(plain(ids).logits, frugal(ids).logits, atol=1e-5)
    for (name, one), other in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5), name
