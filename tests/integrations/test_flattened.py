"""A batch as a tuple, and back."""

import dataclasses
from collections import UserDict

import pytest
import torch

from tightfit.errors import InputError
from tightfit.integrations.lightning import flattened

pytestmark = pytest.mark.keeps("lightning-module-accumulates-hand")

IDS, MASK = torch.arange(6).view(2, 3), torch.ones(2, 3)


@dataclasses.dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    rest: dict
    rows: int = dataclasses.field(init=False, default=2)


def test_dataclasses_and_mappings_are_opened_wherever_they_lie_and_come_back_with_other_tensors():
    flat = flattened([Sample(IDS, {"mask": UserDict(mask=MASK)}), "name"])
    assert [leaf for leaf in flat.leaves if isinstance(leaf, torch.Tensor)] == [IDS, MASK]
    changed, name = flat.restored(tuple(leaf[:1] if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves))
    assert isinstance(changed, Sample)
    assert isinstance(changed.rest["mask"], UserDict)
    assert [len(changed.ids), len(changed.rest["mask"]["mask"]), changed.rows, name] == [1, 1, 2, "name"]


@pytest.mark.parametrize("batch", [object(), [1, "a"], {}, Sample])
def test_a_batch_without_tensors_is_one_line(batch):
    with pytest.raises(InputError, match=f"no tensors were found in a batch of class {type(batch).__name__}"):
        flattened(batch)
