"""The request for which nothing fits, kept for the search for remedies."""

from dataclasses import dataclass

from tightfit.planner.search.search import Search


@dataclass(frozen=True)
class Refusal:
    """The search of the plan that was refused, with its request and the traces that were made.

    `recipes_tried` says that other recipes were tried already, so only another device is left. `in_config` says that
    a configuration asked, so that a way out is a change of its keys. It may have no key for the dtype of the weights
    (`may_convert`), and nothing to adapt (`may_adapt`).
    """

    search: Search
    recipes_tried: bool = False
    in_config: bool = False
    may_convert: bool = True
    may_adapt: bool = True
