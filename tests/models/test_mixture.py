"""A decoder with a mixture of experts: what it computes, what it adds to the loss, and what it takes."""

import pytest
import torch
import torch.nn.functional as F

from tightfit import compile_blocks, estimate, plan, recompute, verify
from tightfit.errors import CompileError, ModelError
from tightfit.levers.compiled import compile_paths
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.models.decoder_config import PRESETS
from tightfit.models.feed_forward import MixtureOfExperts, grouped_product
from tightfit.step import StepSettings, forward_backward, model_loss
from tightfit.training.objective import CausalLMLoss, counted
from tiny import allocator_peak, decoder, token_batch

# dynamo asks a gradient of what it is given
BY_THE_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 48}
TINY = {"hidden_size": 32, "num_layers": 2, "vocab_size": 64}


def mixture(**settings):
    torch.manual_seed(0)
    found = MixtureOfExperts(DecoderConfig(**{"hidden_size": 32, "num_heads": 2, **EXPERTS, **settings}))
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def tiny(**settings):
    return decoder(**{**TINY, **EXPERTS, **settings})


def batch(rows=4, length=24):
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "labels": ids.clone()}


def batch_of(part):
    """What of a micro-batch goes to the model."""
    return {name: value for name, value in part.items() if name not in ("valid_tokens", "whole_rows")}


def one_sided(model):
    """All tokens go to the experts 0 and 1: what all embeddings have in common decides."""
    model.embedding.weight.data[:, 0] = 5.0
    for layer in model.layers:
        layer.mlp.router.weight.data[:2, 0] += 1.0
    return model


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"norm_topk": False}, {"num_shared_experts": 2}, {"experts_per_token": 1}])
@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_each_token_gets_the_weighted_sum_of_its_likeliest_experts(settings, activation):
    layer, x = mixture(**settings, activation=activation), torch.randn(2, 5, 32)
    act = F.silu if activation == "swiglu" else F.gelu
    expected = torch.zeros_like(x)
    for place in [(b, t) for b in range(2) for t in range(5)]:
        token = x[place]
        probabilities = layer.router(token).softmax(-1)
        weights, chosen = probabilities.topk(layer.config.experts_per_token)
        if layer.config.norm_topk:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (layer.gate_up_proj[expert] @ token).chunk(2)
            expected[place] += weight * (layer.down_proj[expert] @ (act(gate) * up))
        if layer.shared is not None:
            expected[place] += layer.shared(token)
    assert torch.allclose(layer(x)[0], expected, atol=1e-4)


def test_the_frugal_gate_computes_the_same():
    x = torch.randn(2, 5, 32)
    assert torch.allclose(mixture()(x)[0], mixture(mlp="low_memory")(x)[0], atol=1e-5)


def test_products_without_groups_are_those_with_them():
    """In fp64, and on cards before Ampere, PyTorch has no grouped products."""
    rows, weights, ends = torch.randn(20, 16), torch.randn(4, 8, 16), torch.tensor([3, 3, 10, 20])
    found = grouped_product(rows.double(), weights.double(), ends)
    assert torch.allclose(found.float(), grouped_product(rows, weights, ends), atol=1e-5)


@pytest.mark.keeps("balance-loss-number-mixtral")
def test_loss_and_auxiliary_loss_are_those_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model, data = tiny(z_loss_coefficient=0.0), batch()
    logits: list[torch.Tensor] = []
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, out: logits.append(out))
    output = model(**data)
    expected = load_balancing_loss_func(tuple(logits), 4, 2)
    assert torch.allclose(output.auxiliary_loss, 0.01 * expected)
    plain = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten())
    assert torch.allclose(output.loss, plain + output.auxiliary_loss)
    assert output.auxiliary_loss.item() == pytest.approx(0.02, rel=0.2)  # 2 experts a token, nearly even: 0.01 * 2


def test_the_z_loss_is_the_mean_square_of_the_log_sum_of_exponentials():
    model = tiny(auxiliary_loss_coefficient=0.0, z_loss_coefficient=0.5)
    logits: list[torch.Tensor] = []
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, out: logits.append(out))
    found = model(**batch()).auxiliary_loss
    assert torch.allclose(found, 0.5 * torch.cat(logits).logsumexp(-1).square().mean())


def test_an_evaluation_and_a_decoder_without_weights_for_them_have_no_auxiliary_loss():
    data = batch()
    assert tiny().eval()(**data).auxiliary_loss is None
    assert tiny(auxiliary_loss_coefficient=0.0, z_loss_coefficient=0.0)(**data).auxiliary_loss is None
    assert decoder(**TINY)(**data).auxiliary_loss is None
    with pytest.raises(ModelError, match="returned no scalar loss"):
        model_loss(tiny(), {"input_ids": data["input_ids"]})  # the auxiliary loss is not taken for it


def test_the_training_loss_has_it_by_the_share_of_valid_tokens():
    model, data = tiny(), batch()
    data["labels"][0, 5:] = -100
    whole = CausalLMLoss()(model, counted(data))
    assert torch.allclose(whole, model(**data).loss)
    parts = split_batch(counted(data), 2)
    losses = [CausalLMLoss()(model, part) for part in parts]
    outputs = [model(**batch_of(part)) for part in parts]
    shares = [(part["labels"][:, 1:] != -100).sum() / counted(data)["valid_tokens"] for part in parts]
    for loss, output, share in zip(losses, outputs, shares, strict=True):
        assert torch.allclose(loss, output.loss * share)
    of_all = counted(data)["valid_tokens"]
    assert torch.allclose(losses[1], model(**batch_of(parts[1]), num_items_in_batch=of_all).loss)
    data["labels"].fill_(-100)
    assert CausalLMLoss()(model, counted(data)).item() == 0


def test_the_balance_loss_spreads_the_tokens():
    """From a router that prefers two experts, with nothing else to learn."""
    model, data = tiny(num_layers=1, auxiliary_loss_coefficient=1.0), batch(rows=8)
    model.embedding.weight.data[:, 0] += 0.05
    model.layers[0].mlp.router.weight.data[:2, 0] += 0.1
    assigned: list[torch.Tensor] = []
    model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: assigned.append(out[1]))
    optimizer = torch.optim.Adam([model.layers[0].mlp.router.weight], lr=0.02)
    for _ in range(30):
        model(**data).auxiliary_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert assigned[0].max() > 150
    assert assigned[-1].max() < 120  # of 384 choices, 96 would be even


@pytest.mark.keeps("recomputed-block-experts-routes")
@pytest.mark.parametrize("settings", [{}, {"num_shared_experts": 1, "first_dense_layers": 1}], ids=str)
def test_recompute_routes_as_the_forward_did_and_changes_no_bit(settings):
    """The whole block again: routing, balance and z-loss, dropout too."""
    model, data = tiny(dropout=0.2, **settings), batch()
    found = []
    for lever in (lambda: None, lambda: recompute(model, "layers.*"), lambda: recompute(model, "layers.*.mlp")):
        handle = lever()
        torch.manual_seed(1)
        model.zero_grad()
        model(**data).loss.backward()
        found.append(gradients(model))
        if handle is not None:
            handle.undo()
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(gradient, other[name]), name
    assert all(gradient.abs().sum() > 0 for gradient in found[0].values())


@pytest.mark.keeps("recomputed-block-experts-routes")
def test_pytorchs_reentrant_checkpoint_keeps_the_gradient_of_the_auxiliary_loss():
    model, data = tiny(), batch()
    embedded = model.embedding.register_forward_hook(lambda module, inputs, out: out + 0)
    model(**data).loss.backward()
    plain = gradients(model)
    model.zero_grad()
    with recompute(model, "layers.*", use_reentrant=True):
        model(**data).loss.backward()
    embedded.remove()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, gradients(model)[name], atol=1e-7), name


@pytest.mark.keeps("recomputed-block-experts-routes")
def test_no_tensor_is_left_on_a_module():
    model = tiny()
    model(**batch()).loss.backward()
    for name, module in model.named_modules():
        left = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
        assert not left, f"{name}: {left}"


@pytest.mark.keeps("decoder-mixture-experts-peak")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_peak_is_predicted_for_any_routing(precision):
    settings, data = StepSettings(precision=precision), token_batch(2, 64)
    model = decoder(num_layers=1, num_shared_experts=1, **EXPERTS)
    found = estimate(model, data, precision=precision)
    assert found.peak_bytes == pytest.approx(allocator_peak(model, data, settings=settings), rel=1e-3)
    assert found.worst_peak_bytes in (None, found.peak_bytes)
    one_sided(model)
    assert model.layers[0].mlp(model.embedding(data["input_ids"]))[1].tolist() == [128, 128, 0, 0]
    assert found.peak_bytes == pytest.approx(allocator_peak(model, data, settings=settings), rel=1e-3)


@pytest.mark.keeps("decoder-mixture-experts-peak")
@pytest.mark.slow  # two plans of experts
def test_a_plan_keeps_to_its_budget_and_changes_no_bit():
    model, data = decoder(num_layers=2, hidden_size=32, **EXPERTS), token_batch(2, 32)
    budget = int(0.85 * estimate(model, data).peak_bytes)
    made = plan(model, data, budget, levers="exact")
    assert verify(model, data, made).ok
    with made.apply(model):
        assert allocator_peak(model, data) <= budget


def test_micro_batches_are_balanced_each_by_itself_and_else_add_up():
    loss = CausalLMLoss()
    for settings, equal in (({"auxiliary_loss_coefficient": 0.0, "z_loss_coefficient": 0.0}, True), ({}, False)):
        found = []
        for count in (1, 2):
            model, data = tiny(**settings), counted(batch())
            forward_backward(model, as_parts(split_batch(data, count), loss), loss)
            found.append(gradients(model))
        same = all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])
        assert same == equal


def test_a_shape_that_cannot_be_is_refused_by_its_key():
    for changes, text in (
        ({"experts_per_token": 5}, r"model\.experts_per_token 5 is more than model\.num_experts 4"),
        ({"first_dense_layers": 2, "num_layers": 2}, r"model\.first_dense_layers 2 leaves none"),
        ({"expert_intermediate_size": 50}, r"model\.expert_intermediate_size 50 is not a multiple of 8"),
        ({"mlp_tile": 8}, r"model\.num_experts and model\.mlp_tile exclude each other"),
        ({"num_experts": None}, r"model\.expert_intermediate_size 48 is about experts"),
    ):
        with pytest.raises(ModelError, match=text) as caught:
            DecoderConfig(**{**EXPERTS, **changes})
        assert "\n" not in str(caught.value)


def test_its_presets_have_their_published_sizes():
    for name, size in (("lite-moe", 145e6), ("1b", 1.236e9)):
        with torch.device("meta"):
            model = Decoder(DecoderConfig(**PRESETS[name]))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.005)


@BY_THE_COMPILER
def test_a_plan_leaves_out_compiled_blocks_with_products_that_the_compiler_does_not_know():
    model, data = tiny(), batch()
    with compile_paths(model, {"layers.0": 1.0}), pytest.raises(CompileError, match="cannot be compiled as a whole"):
        estimate(model, data)


@pytest.mark.slow  # builds some thirty kernels
@BY_THE_COMPILER
def test_compiled_blocks_compute_the_same_within_rounding():
    model, data = tiny(), batch()
    model(**data).loss.backward()
    plain = gradients(model)
    model.zero_grad()
    with compile_blocks(model, "layers.*"):
        model(**data).loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.allclose(gradient, plain[name], atol=1e-6), name
