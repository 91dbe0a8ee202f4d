"""A combination of levers that concern the whole step."""

from dataclasses import dataclass

from tightfit.planner.levers.base import L, Lever, find, lever_types
from tightfit.planner.levers.micro_batch import MicroBatches


@dataclass(frozen=True)
class Combination:
    """At most one setting of each lever, in the order of their registration."""

    levers: tuple[Lever, ...] = ()

    @classmethod
    def of(cls, micro_batches: int) -> "Combination":
        """The step in the caller's own `micro_batches` parts, with no other lever."""
        return cls((MicroBatches(micro_batches, tried=True),) if micro_batches > 1 else ())

    @property
    def micro_batches(self) -> int:
        found = find(self.levers, MicroBatches)
        return 1 if found is None else found.count

    def get(self, kind: type[L]) -> L | None:
        """The setting of a lever; None if the combination does not use it."""
        return find(self.levers, kind)

    def with_lever(self, lever: Lever | None) -> "Combination":
        """The combination with a lever added. It replaces another setting of the same lever. None changes nothing."""
        if lever is None:
            return self
        order = {kind: place for place, kind in enumerate(lever_types())}
        others = (other for other in self.levers if type(other) is not type(lever))
        return Combination(tuple(sorted((*others, lever), key=lambda each: order[type(each)])))

    def without(self, *kinds: type[Lever]) -> "Combination":
        """The combination without the levers of some types."""
        return Combination(tuple(lever for lever in self.levers if not isinstance(lever, kinds)))

    def __str__(self) -> str:
        return " + ".join(str(lever) for lever in self.levers) or "plain"
