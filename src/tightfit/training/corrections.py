"""The corrections that a training has learnt about its memory while it ran: kept in checkpoints, so that a resumed one
need not fail again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tightfit.planner.plans import Plan
from tightfit.ranks.processes.ranks import Ranks


@dataclass(frozen=True)
class Corrections:
    """`plan` is the plan in force, where it is no longer the one that the training began with. `bound_bytes` is the
    peak that plans are held within since an out of memory. With `one_by_one` the optimizer updates one parameter at a
    time. `failures` counts the times that memory ran out, `loosened` the looser plans that took over from a slow one.
    """

    plan: Plan | None = None
    bound_bytes: int | None = None
    one_by_one: bool = False
    failures: int = 0
    loosened: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**named, "plan": None if self.plan is None else self.plan.to_dict()}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave. Raises `TypeError` and `ValueError` for anything else."""
        return cls(**{**raw, "plan": None if raw["plan"] is None else Plan.from_dict(raw["plan"])})


def corrections_of_all(ranks: Ranks, own: Corrections) -> list[dict[str, Any]]:
    """The corrections of all ranks, in their order, as JSON: under DDP each learns by itself."""
    return [json.loads(content) for content in ranks.gathered(json.dumps(own.to_dict()).encode())]


def corrections_of(stored: Any, rank: int) -> Corrections:
    """Those of one rank, from the JSON of all. Raises `LookupError`, `TypeError` or `ValueError` for anything else."""
    # Checkpoints of before have one rank's alone.
    return Corrections.from_dict(stored if isinstance(stored, dict) else stored[rank])
