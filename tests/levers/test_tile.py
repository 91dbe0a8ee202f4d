"""Modules tiled along the sequence: the same gradients to rounding, in the memory of one tile."""

import copy

import pytest
import torch
from torch import nn

from tightfit import estimate, recompute, tile
from tightfit.errors import InputError, LeverError
from tightfit.ops import tiled
from tightfit.step import model_loss
from tiny import allocator_peak, decoder, token_batch


def gradients(model, batch):
    model.zero_grad()
    loss = model_loss(model, batch)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.keeps("tiled-feed-forwards-plain")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", [{}, {"mlp": "low_memory"}, {"activation": "geglu"}], ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 95, 96, 500])
def test_in_fp64_loss_and_gradients_are_the_plain_ones(settings, tokens):
    model, batch = decoder(**settings).double(), token_batch()
    plain = gradients(model, batch)
    with tile(model, "layers.*.mlp", tokens):
        made = gradients(model, batch)
    for one, other in zip(made, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_in_fp32_the_error_is_near_that_of_the_plain_run():
    model, batch = decoder(), token_batch()
    truth = gradients(copy.deepcopy(model).double(), batch)
    plain = gradients(model, batch)
    with tile(model, "layers.*.mlp", 20):
        made = gradients(model, batch)

    def error(made):
        return sum((a.double() - b).square().sum() for a, b in zip(made[1:], truth[1:], strict=True)) ** 0.5

    assert error(made) <= 1.2 * error(plain)


@pytest.mark.keeps("tiled-feed-forwards-plain")
def test_the_peak_falls_and_is_predicted():
    model, batch = decoder(intermediate_size=1024), token_batch()
    plain = allocator_peak(model, batch)
    with tile(model, "layers.*.mlp", 16):
        frugal = allocator_peak(model, batch)
        assert estimate(model, batch).peak_bytes == pytest.approx(frugal, rel=1e-3)
    # what each of three layers holds of its feed-forward: gate, up, activation and product, 1024 wide
    held = 3 * 4 * 4 * 96 * 1024 * 4
    assert plain - frugal > 0.7 * held


def test_together_with_recompute_of_the_blocks_the_gradients_stay_the_same():
    model, batch = decoder().double(), token_batch()
    plain = gradients(model, batch)
    with tile(model, "layers.*.mlp", 20), recompute(model, "layers.*"):
        both = gradients(model, batch)
    for one, other in zip(both, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{"mlp_tile": 20}, {"mlp_tile": 20, "mlp": "low_memory"}], ids=str)
def test_the_decoder_tiles_by_a_key_of_its_own(settings):
    plain, other = decoder().double(), decoder(**settings).double()
    for one, wanted in zip(gradients(other, token_batch()), gradients(plain, token_batch()), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)
    assert allocator_peak(decoder(**settings), token_batch()) < allocator_peak(decoder(), token_batch())


def test_a_tile_that_draws_random_numbers_draws_the_same_in_backward():
    x = torch.randn(2, 12, 8, requires_grad=True)
    output = tiled(lambda part: nn.functional.dropout(part, 0.5), x, 4, [])
    state = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(gradient * x, output)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.parametrize(
    "weights", [lambda block: [], nn.Module.parameters], ids=["none", "dynamo gives up the caller"]
)
def test_a_compiled_block_runs_its_tiles_as_they_are_written(weights):
    def drop(part):
        compiled.append(torch.compiler.is_compiling())
        return nn.functional.dropout(part, 0.5)

    class Block(nn.Module):
        def forward(self, x):
            return tiled(drop, x * 2, 4, weights(self)) + 1

    def output_and_gradient(function):
        torch.manual_seed(0)
        x = torch.randn(2, 12, 8, requires_grad=True)
        output = function(x)
        return output, *torch.autograd.grad(output.sum(), x)

    compiled = []
    plain = output_and_gradient(Block())
    made = output_and_gradient(torch.compile(Block(), backend="eager"))
    assert len(compiled) == 2 * 2 * 3, "three tiles in forward and in backward, plain and compiled"
    assert not any(compiled)
    assert all(map(torch.equal, made, plain))


class TwoBiases(nn.Module):
    """Autograd gives both biases one and the same gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(1, 1, 1)) for _ in range(2))

    def forward(self, x):
        return x * (self.first + self.second)


def test_weights_that_share_a_gradient_each_get_all_of_it():
    model, x = nn.Sequential(TwoBiases()), torch.randn(2, 12, 8, dtype=torch.float64)
    part = model.double()[0]
    plain = torch.autograd.grad(model(x).sum(), [part.first, part.second])
    with tile(model, "0", 3):
        made = torch.autograd.grad(model(x).sum(), [part.first, part.second])
    torch.testing.assert_close(made, plain)


def test_frozen_weights_get_no_gradient():
    model, batch = decoder(), token_batch()
    model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    with tile(model, "layers.*.mlp", 20):
        model_loss(model, batch).backward()
    assert model.layers[0].mlp.up_proj.weight.grad is None
    assert model.layers[0].mlp.down_proj.weight.grad is not None


def test_undo_restores_every_module_exactly():
    model, batch = decoder(), token_batch()
    before = [copy.copy(module.__dict__) for module in model.modules()]
    hooks = [[list(value) for name, value in names.items() if "hooks" in name and value] for names in before]
    plain = gradients(model, batch)
    applied = tile(model, "layers.*.mlp", 20)
    assert "forward" in model.layers[0].mlp.__dict__
    assert not all(map(torch.equal, gradients(model, batch), plain)), "tiles sum in another order"
    applied.undo()
    after = [module.__dict__ for module in model.modules()]
    for names, restored in zip(before, after, strict=True):
        assert restored.keys() == names.keys()
        assert all(restored[name] is value for name, value in names.items())
    assert hooks == [[list(value) for name, value in names.items() if "hooks" in name and value] for names in after]
    assert all(map(torch.equal, gradients(model, batch), plain))


def test_under_autocast_the_tiles_are_cast_as_the_whole():
    model, batch = decoder(), token_batch()

    def cast():
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, batch)

    plain = cast()
    with tile(model, "layers.*.mlp", 20):
        made = cast()
    for one, other in zip(made, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize(("length", "tokens"), [(64, 16), (8, 16)], ids=["tiles", "fewer tokens than a tile"])
def test_an_estimate_refuses_a_module_with_two_results_by_its_path(length, tokens):
    model = nn.Sequential(nn.Linear(8, 8), Two())
    with tile(model, "1", tokens), pytest.raises(LeverError, match=r"1 does not return one tensor \(B, T, m\)"):
        estimate(model, {"x": torch.randn(2, length, 8)}, loss=lambda m, b: m(b["x"])[0].sum())


class Mixing(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


class Two(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.keeps("tiled-feed-forwards-plain")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Mixing(), "0 mixes tokens or draws random numbers"),
        (nn.Dropout(0.5), "0 mixes tokens or draws random numbers"),
        (Two(), r"0 does not return one tensor \(B, T, m\)"),
        (nn.Embedding(4, 8), r"0 is not given one tensor \(B, T, n\)"),
    ],
)
def test_a_module_that_cannot_be_tiled_is_refused_by_name_and_no_random_number_is_used_up(part, message):
    model = nn.Sequential(part)
    x = torch.zeros(2, 12, dtype=torch.long) if isinstance(part, nn.Embedding) else torch.randn(2, 12, 8)
    state = torch.get_rng_state()
    with tile(model, "0", 4), pytest.raises(LeverError, match=message) as caught:
        model(x)
    assert "\n" not in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("pattern", "tokens", "message"),
    [("layers.*.mlp", 0, "tokens=0 is less than 1"), ("blocks.*", 8, "no module matches")],
)
def test_what_makes_no_sense_is_refused(pattern, tokens, message):
    with pytest.raises(LeverError, match=message):
        tile(decoder(), pattern, tokens)


def test_a_module_whose_forward_is_replaced_is_refused_and_differentiating_twice_too():
    model, batch = decoder(), token_batch()
    with tile(model, "layers.*.mlp", 20):
        with pytest.raises(LeverError, match=r"forward of layers.0.mlp is already replaced"):
            tile(model, "layers.*.mlp", 20)
        weight = model.layers[0].mlp.down_proj.weight
        (gradient,) = torch.autograd.grad(model_loss(model, batch), weight, create_graph=True)
        with pytest.raises(InputError, match="tiled: cannot be differentiated twice"):
            gradient.sum().backward()
