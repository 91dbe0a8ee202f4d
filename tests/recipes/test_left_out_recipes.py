"""Recipes that fail: each is named with its reason, and the table of the others comes all the same."""

import pytest
import torch

import tightfit
from made_up_devices import even
from tightfit import TokenBatch
from tightfit.errors import BudgetError, InputError
from tightfit.models.decoder import Decoder
from tightfit.recipes import shares
from tightfit.recipes.search import RecipeSearch
from tiny import decoder

SHAPE = {"hidden_size": 32, "num_layers": 2}
BATCH = TokenBatch(2, 32, 600)
ROOMY, TIGHT = "4MiB", "100KiB"


def _fit(model=None, budget=ROOMY):
    model = decoder(**SHAPE) if model is None else model
    return tightfit.fit(model, BATCH, device=even(), budget=budget, optimizer="adamw_fused")


class _OnlyInFp32(Decoder):
    def forward(self, *args, **kwargs):
        if next(self.parameters()).dtype != torch.float32:
            raise ZeroDivisionError("of the model's own")
        return super().forward(*args, **kwargs)


class _Never(Decoder):
    def forward(self, *args, **kwargs):
        raise KeyError("nowhere")


def _as(kind):
    model = decoder(**SHAPE)
    model.__class__ = kind
    return model


def _fails_for(dtype, method):
    """The method, which fails for recipes of weights in this dtype."""

    def failing(search, found, **kwargs):
        if found.recipe.dtype == dtype:
            return min([])
        return method(search, found, **kwargs)

    return failing


def test_a_recipe_that_the_models_own_code_does_not_take_is_named_and_left_out():
    found = _fit(_as(_OnlyInFp32))
    assert found.best is not None
    assert {outcome.recipe.dtype for outcome in found} == {"fp32"}
    (note,) = found.notes
    assert "bf16 weights, fused AdamW; bf16 weights, fused AdamW, step in backward" in note
    assert "of the model's own" in note
    assert "test_left_out_recipes.py" in note


@pytest.mark.slow  # a search for each step
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("owner", "name", "budget", "left"),
    [
        (RecipeSearch, "confirmed", ROOMY, True),
        (RecipeSearch, "last_resort", TIGHT, False),  # its row is known, and only its least bytes are not
        (shares, "with_sizes", ROOMY, False),
    ],
)
def test_the_table_comes_where_one_step_of_the_search_fails_for_a_recipe(monkeypatch, owner, name, budget, left):
    monkeypatch.setattr(owner, name, _fails_for("bf16", getattr(owner, name)))
    found = _fit(budget=budget)
    assert any("bf16 weights" in note and "ValueError" in note for note in found.notes)
    assert any(outcome.recipe.dtype == "fp32" for outcome in found)
    assert any(outcome.recipe.dtype == "bf16" for outcome in found) != left
    monkeypatch.undo()
    others = _fit(budget=budget)
    assert not others.notes, "the subject is what fails"


def test_where_every_recipe_fails_for_one_reason_it_is_said_once():
    with pytest.raises(InputError, match=r"no recipe could be tried: [^;]*nowhere") as raised:
        _fit(_as(_Never))
    assert str(raised.value).count("nowhere") == 1


def test_a_budget_that_cannot_be_read_is_no_recipes_fault():
    with pytest.raises(BudgetError):
        _fit(budget="4 parsecs")
