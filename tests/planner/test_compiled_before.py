"""A model that the user has compiled is refused by name: a dry run would see it as it was written."""

import pytest
import torch

import tightfit
from round_device import round_device
from tightfit.errors import InputError
from tightfit.step import model_loss
from tiny import decoder, token_batch


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def blocks(model):
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    return model


def blocks_in_place(model):
    model.layers[1].compile(backend="eager")
    return model


def a_forward(model):
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend="eager")
    return model


@pytest.mark.keeps("model-compiled-before-refused")
@pytest.mark.parametrize("ask", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("compile", "named"),
    [(whole, "the model"), (in_place, "the model")]
    + [(kind, r"layers\.1") for kind in (blocks, blocks_in_place, a_forward)],
)
def test_a_compiled_model_is_refused_by_name(compile, named, ask):
    model = compile(decoder(num_layers=2))
    budget = ("0.8x",) if ask == "plan" else ()
    with pytest.raises(InputError, match=rf"^{named} is compiled by torch\.compile"):
        getattr(tightfit, ask)(model, token_batch(), *budget, device=round_device())


@pytest.mark.parametrize("ask", [tightfit.estimate, lambda *step, **how: tightfit.plan(*step, "0.9x", **how)])
def test_a_compiled_loss_is_refused_by_name(ask):
    with pytest.raises(InputError, match=r"loss is compiled by torch\.compile"):
        ask(decoder(), token_batch(), loss=torch.compile(model_loss, backend="eager"), device=round_device())
