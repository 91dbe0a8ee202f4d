"""What a training has learnt about its memory while it ran: kept in checkpoints, so that a resumed one need not fail
again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from tightfit.planner.plans import Plan


@dataclass(frozen=True)
class Corrections:
    """`plan` is the plan in force, as `Plan.to_dict` writes it, where it is no longer the one that the training began
    with. `bound_bytes` is the peak that plans are held within since an out of memory. With `one_by_one` the optimizer
    updates one parameter at a time. `failures` counts the steps that ran out of memory, `loosened` the looser plans
    that were tried because the plan was slow.
    """

    plan: Mapping[str, Any] | None = None
    bound_bytes: int | None = None
    one_by_one: bool = False
    failures: int = 0
    loosened: int = 0

    def with_plan(self, plan: Plan, bound_bytes: int | None) -> Self:
        """These corrections with another plan in force."""
        return replace(self, plan=plan.to_dict(), bound_bytes=bound_bytes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave. Raises `TypeError` for other keys."""
        return cls(**raw)

    def corrected_plan(self) -> Plan | None:
        """The plan that was in force; None for the one that a training begins with."""
        return None if self.plan is None else Plan.from_dict(self.plan)
