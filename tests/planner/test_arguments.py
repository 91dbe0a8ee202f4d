"""What a call of the API cannot mean is told by the argument's name, before anything is traced."""

import math

import pytest
import torch
from torch import nn

from models_by_name import VOCABULARY, decoder
from tightfit import TokenBatch, estimate, plan
from tightfit.errors import BudgetError, InputError, ModelError

BATCH = TokenBatch(2, 16, VOCABULARY)


@pytest.fixture(scope="module")
def model():
    return decoder()


@pytest.mark.keeps("wrong-argument-api-loss")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loss": 3}, "loss is a int, wanted callable"),
        ({"optimizer": 3}, "optimizer is a int, wanted a name such as 'adamw'"),
        ({"precision": "fp8"}, "precision 'fp8' is not known"),
        ({"micro_batches": 0}, "micro_batches is 0, wanted an integer of at least 1"),
        ({"micro_batches": 1.5}, "micro_batches is 1.5, wanted an integer"),
        ({"grad_clip": -1}, "grad_clip is -1, wanted a number above zero"),
        ({"grad_clip": math.nan}, "grad_clip is nan, wanted a number above zero"),
        ({"grad_clip": "1"}, "grad_clip is '1', wanted a number above zero"),
        ({"batch": None}, "batch is a NoneType, wanted a dict"),
        ({"batch": torch.ones(2, 3)}, "batch is a Tensor, wanted a dict"),
        ({"batch": TokenBatch(0, 16, 8)}, "size is 0, wanted at least 1"),
        ({"batch": TokenBatch(1, -4, 8)}, "length is -4, wanted at least 1"),
    ],
    ids=str,
)
def test_an_argument_that_means_nothing_is_told_by_its_name(model, arguments, said):
    batch = arguments.pop("batch", BATCH)
    with pytest.raises(InputError) as error:
        estimate(model, batch, **arguments)
    assert said in str(error.value)


@pytest.mark.parametrize("budget", [None, 1e9, math.nan, [2**30], True], ids=str)
def test_a_budget_is_an_integer_or_text(model, budget):
    with pytest.raises(BudgetError, match="is not an amount of memory"):
        plan(model, BATCH, budget)


def test_levers_and_blocks_are_names(model):
    with pytest.raises(InputError, match="levers is a int"):
        plan(model, BATCH, "2x", levers=3)
    with pytest.raises(InputError, match="blocks is a int"):
        plan(model, BATCH, "2x", blocks=3)


def test_a_model_that_nothing_trains():
    with pytest.raises(InputError, match="Linear has no parameter to train"):
        estimate(nn.Linear(2, 2).requires_grad_(False), (torch.ones(1, 2),))


@pytest.mark.keeps("wrong-argument-api-loss")
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: model(**batch).logits, r"the loss has the shape \(2, 16, 64\), wanted one number"),
        (lambda model, batch: model(**batch).loss.detach(), "the loss depends on no parameter that is trained"),
        (lambda model, batch: 3.5, "the loss is a float"),
    ],
    ids=["logits", "detached", "number"],
)
def test_a_loss_that_backward_cannot_begin_at(model, loss, said):
    with pytest.raises(ModelError, match=said):
        estimate(model, BATCH, loss=loss)
