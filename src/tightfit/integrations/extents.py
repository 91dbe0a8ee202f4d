"""Records the extents of a training's batches so far. A plan must fit all of them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tightfit.integrations.batches import ignores_labels, is_mask
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.step import Batch


@dataclass(frozen=True)
class Extent:
    """The properties of a tensor on which a plan depends: its size, and whether it masks a token or ignores a label."""

    shape: torch.Size
    dtype: torch.dtype
    is_mask: bool
    masks: bool
    ignores: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Extent":
        mask = is_mask(tensor)
        return cls(tensor.shape, tensor.dtype, mask, mask and not bool(tensor.all()), ignores_labels(tensor))

    def covers(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is not longer in any dimension, and masks or ignores only if this one did."""
        return (
            tensor.dim() == len(self.shape)
            and all(length <= known for length, known in zip(tensor.shape, self.shape, strict=True))
            and (self.masks or not self.is_mask or bool(tensor.all()))
            and (self.ignores or not ignores_labels(tensor))
        )

    def tensor(self, device: torch.device) -> torch.Tensor:
        """A tensor of this extent."""
        made = torch.full(self.shape, int(self.is_mask), dtype=self.dtype, device=device)
        if self.masks or self.ignores:
            made[(-1,) * made.dim()] = 0 if self.masks else IGNORE_INDEX
        return made


class Extents:
    """The extents of the batches that a plan is known to fit. The batches themselves would use memory.

    Values that are no tensors do not count. A plan also depends on the step, which `step` identifies: with another
    step, the extents are only those of batches that may come again.
    """

    def __init__(self) -> None:
        self._batches: list[_Extents] = []
        self._step: Hashable = None

    def cover(self, leaves: Sequence[Any], step: Hashable = None) -> bool:
        """True if a recorded batch covers this one, for the same step."""
        return step == self._step and any(_covers(extents, leaves) for extents in self._batches)

    def are_of_another(self, step: Hashable) -> bool:
        """True if the plan was made for another step."""
        return bool(self._batches) and step != self._step

    def batches(self, leaves: Sequence[Any]) -> list[Batch]:
        """This batch, and one like each recorded batch that it does not cover."""
        return [tuple(leaves), *(_like(extents, leaves) for extents in self._others(leaves))]

    def add(self, leaves: Sequence[Any], step: Hashable = None) -> None:
        """Record that a plan for this step fits the result of `batches`."""
        self._step = step
        self._batches = [*self._others(leaves), _extents(leaves)]

    def _others(self, leaves: Sequence[Any]) -> list["_Extents"]:
        new = _extents(leaves)
        alike = [extents for extents in self._batches if _are_alike(extents, leaves)]
        return [extents for extents in alike if not _covers(new, _like(extents, leaves))]


_Extents = tuple[Extent | None, ...]


def _extents(leaves: Sequence[Any]) -> _Extents:
    return tuple(Extent.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def _are_alike(extents: _Extents, leaves: Sequence[Any]) -> bool:
    """True if a batch has its tensors in the same places."""
    return [extent is not None for extent in extents] == [isinstance(leaf, torch.Tensor) for leaf in leaves]


def _covers(extents: _Extents, leaves: Sequence[Any]) -> bool:
    pairs = zip(extents, leaves, strict=False)
    return _are_alike(extents, leaves) and all(extent is None or extent.covers(leaf) for extent, leaf in pairs)


def _like(extents: _Extents, leaves: Sequence[Any]) -> Batch:
    """A batch of these extents on the device of this one, with its values that are no tensors."""
    pairs = zip(extents, leaves, strict=True)
    return tuple(leaf if extent is None else extent.tensor(leaf.device) for extent, leaf in pairs)
