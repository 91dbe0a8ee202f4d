"""What was asked for where nothing fits, for whoever looks for ways out."""

from dataclasses import dataclass

from tightfit.planner.asked import Asked
from tightfit.planner.search.search import Search


@dataclass(frozen=True)
class Refusal:
    """The arguments of the plan that was refused, and its search, with the traces that were made.

    `recipes_tried` says that other recipes were tried already, so only another device is left.
    """

    asked: Asked
    search: Search
    recipes_tried: bool = False
