"""The order of recipes: what fits first; then what a person would rather train."""

import math
from collections.abc import Sequence

from tightfit.names import facts_of
from tightfit.recipes.records import LOW_RANK, OTHER, PRODUCTS, WEIGHTS, Outcome, Recipe

# What a change of the result is worth in doublings of a step's time: a recipe that changes less stands first unless it
# is slower by more than this. Judgement, not measurement. Adapters on all layers learn about as well as full training
# where the data is small (Hu et al. 2021; Dettmers et al. 2023), so they are worth a step half as fast, not more.
WORTH = {
    PRODUCTS: 0.1,
    WEIGHTS: 0.3,
    "8-bit states": 0.2,
    "4-bit states": 0.5,
    "24-bit master weights": 0.05,
    "frozen weights in 8 bits": 0.4,
    "frozen weights in 4 bits": 0.5,
    OTHER: 1.5,
    LOW_RANK: 1.0,
}
ROUNDED_UPDATES = 0.25  # bf16 weights that an optimizer rounds to nearest lose small updates
PRICE_OF_SLOWNESS = 1e-9  # breaks ties


def cost_of_changes(recipe: Recipe) -> float:
    """The price of a recipe's changes to the result, in doublings of a step's time."""
    rounded = recipe.adapter is None and recipe.dtype == "bf16" and facts_of(recipe.optimizer).rounds
    return sum(WORTH[change] for change in recipe.changed) + (ROUNDED_UPDATES if rounded else 0.0)


def ranked(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes, best first. Of those that do not fit, the one that needs least stands first.

    Among those that fit, a recipe is worse than another one that changes no more and is no slower. Such recipes stand
    behind all others: there is no reason to take them but their memory.
    """
    fitting = [outcome for outcome in outcomes if outcome.fits]
    others = sorted((o for o in outcomes if not o.fits), key=lambda o: (o.needed_bytes, o.name))

    def key(outcome: Outcome) -> tuple:
        return any(_beats(other, outcome) for other in fitting), _score(outcome), outcome.peak_bytes, outcome.name

    return (*sorted(fitting, key=key), *others)


def _score(outcome: Outcome) -> float:
    return cost_of_changes(outcome.recipe) + math.log2(max(outcome.step_seconds or 0.0, PRICE_OF_SLOWNESS))


def _beats(one: Outcome, other: Outcome) -> bool:
    """True if one recipe trains the same with no more changes and no more time."""
    if one.recipe.trains != other.recipe.trains or one is other:
        return False
    mine, its = cost_of_changes(one.recipe), cost_of_changes(other.recipe)
    seconds, other_seconds = one.step_seconds or 0.0, other.step_seconds or 0.0
    return mine <= its and seconds <= other_seconds and (mine < its or seconds < other_seconds)
