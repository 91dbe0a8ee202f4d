"""Recipes by name, and what they change."""

import pytest

from tightfit.recipes.records import LargestSize, Outcome, Recipe, RecipesRecord
from tightfit.training.config import AdapterConfig

NF4 = AdapterConfig(r=16, base="nf4")


@pytest.mark.parametrize(
    ("recipe", "name", "changes"),
    [
        (Recipe(), "fp32 weights, AdamW", "nothing"),
        (Recipe(step_in_backward=True), "fp32 weights, AdamW, step in backward", "nothing"),
        (Recipe(precision="bf16"), "fp32 weights, bf16 autocast, AdamW", "products in 16 bits"),
        (Recipe("bf16", optimizer="adamw8bit"), "bf16 weights, 8-bit AdamW", "weights in 16 bits, 8-bit states"),
        (
            Recipe(optimizer="offloaded_adamw:0.5"),
            "fp32 weights, AdamW, 50% of states on the host",
            "nothing",
        ),
        (
            Recipe("bf16", NF4, precision="bf16"),
            "LoRA r 16 on nf4, AdamW",
            "frozen weights in 4 bits, low rank",
        ),
    ],
)
def test_a_recipe_says_what_it_is_and_what_it_changes(recipe, name, changes):
    assert (recipe.name, recipe.changes) == (name, changes)


def test_levers_exact_to_rounding_change_nothing_else():
    made = Outcome(Recipe(), True, 8, 8, levers=("chunked_loss",), rounds=True)
    assert made.changes == "rounding"
    assert Outcome(Recipe("bf16"), True, 8, 8, rounds=True).changes == "weights in 16 bits"


def test_the_best_is_the_first_if_it_fits():
    fits, not_fit = Outcome(Recipe(), True, 8, 8, longest_sequence=LargestSize(64)), Outcome(Recipe(), False, 9, 9)
    found = RecipesRecord((fits, not_fit), "rtx4090", 8)
    assert (found.best, found.fitting, len(found), list(found)) == (fits, (fits,), 2, [fits, not_fit])
    assert RecipesRecord((not_fit,), "rtx4090", 8).best is None
    assert [each["longest_sequence"] for each in found.to_dict()["recipes"]] == [64, None]
    assert (str(LargestSize(2048)), str(LargestSize(64, confirmed=True))) == ("~2,048", "64")
