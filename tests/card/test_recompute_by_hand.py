"""Recompute by hand on a card: captured programs where that is exact, bit-equal to plain steps either way."""

import copy

import pytest
import torch

import tightfit
from tightfit.errors import LeverError
from tiny import decoder, token_batch

pytestmark = [pytest.mark.usefixtures("values"), pytest.mark.keeps("card-traps-captured-recomputed")]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=2, dropout=0.1).cuda()


def gradients(model, calls=1, steps=1):
    """The gradients after each of some steps under autocast, whose loss calls the model several times."""
    batch, found = {name: tensor.cuda() for name, tensor in token_batch(2, 16).items()}, []
    torch.manual_seed(0)
    for _ in range(steps):
        with torch.autocast("cuda", torch.bfloat16):
            loss = sum(model(**batch).loss for _ in range(calls))
        loss.backward()
        found += [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.parametrize(("calls", "captures"), [(1, 1), (2, 0)])
def test_blocks_are_captured_unless_autocast_would_share_casts_among_calls(model, calls, captures):
    plain = gradients(copy.deepcopy(model), calls, steps=3)
    frugal = copy.deepcopy(model)
    with tightfit.recompute(frugal, "layers.*"):
        assert all(map(torch.equal, plain, gradients(frugal, calls, steps=3)))
        assert vars(frugal.layers[0])["forward"].program.captures == captures


class Divided(torch.Tensor):
    """A weight of another class, as those of FSDP2 or quantised ones."""


def test_a_block_whose_weights_are_no_plain_tensors_is_recorded(model):
    frugal = copy.deepcopy(model)
    frugal.layers[0].register_buffer("divided", torch.ones(2, device="cuda").as_subclass(Divided))
    with tightfit.recompute(frugal, "layers.*"):
        gradients(frugal, steps=2)
        assert [vars(layer)["forward"].program.captures for layer in frugal.layers] == [0, 1]


def test_gradients_of_gradients_need_the_recorder(model):
    x = torch.rand(3, 8, device="cuda", requires_grad=True)
    stack = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())).cuda()

    def penalty(captured):
        with tightfit.recompute(stack, "*", captured=captured):
            (first,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), stack[0][0].weight)[0]

    with pytest.raises(LeverError, match=r"captured=False"):
        penalty(captured=True)
    assert penalty(captured=False).isfinite().all()
