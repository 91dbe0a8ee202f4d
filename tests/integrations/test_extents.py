"""What a plan has to hold for is what the batches have shown so far, without keeping them."""

import pytest
import torch

from tightfit.integrations.extents import Extents
from tightfit.levers.micro_batch import IGNORE_INDEX

pytestmark = pytest.mark.keeps("lightning-plan-made-again")

IDS = torch.arange(2, 10).view(2, 4)
WHOLE = torch.ones(2, 4, dtype=torch.int64)
MASKED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
LABELS = IDS.masked_fill(MASKED == 0, IGNORE_INDEX)


def seen(*batches):
    extents = Extents()
    for batch in batches:
        extents.add(batch)
    return extents


def test_a_batch_is_covered_by_one_that_had_all_it_has():
    extents = seen((IDS, MASKED, LABELS))
    assert extents.cover((IDS, WHOLE, IDS))
    assert extents.cover((IDS[:1], MASKED[1:], LABELS[1:]))
    assert not Extents().cover((IDS,))


def test_more_elements_the_first_masked_token_and_the_first_ignored_label_are_not_covered():
    extents = seen((IDS, WHOLE, IDS))
    assert extents.cover((IDS + 1, WHOLE, IDS))
    assert not extents.cover((IDS, MASKED, IDS))
    assert not extents.cover((IDS, WHOLE, LABELS))
    assert not extents.cover(tuple(tensor.repeat(1, 2) for tensor in (IDS, WHOLE, IDS)))


def test_a_batch_that_is_longer_in_some_dimension_is_not_covered_however_many_elements_it_has():
    extents = seen((IDS,))
    assert not extents.cover((IDS.view(1, 8),))
    assert not extents.cover((IDS.view(8),))
    extents.add((IDS.view(1, 8),))
    assert extents.cover((IDS[:, :3],))
    assert extents.cover((IDS.view(1, 8)[:, :7],))
    assert not extents.cover((IDS.repeat(1, 2)[:, :5],))


def test_in_another_step_nothing_is_covered_but_batches_like_those_before_come_back():
    extents = seen((IDS,))
    assert not extents.are_of_another(None)
    assert extents.are_of_another("two batches accumulated")
    assert not extents.cover((IDS[:1],), "two batches accumulated")
    extents.add((IDS[:1],), "two batches accumulated")
    assert extents.cover((IDS,), "two batches accumulated")
    assert not Extents().are_of_another("two batches accumulated")


def test_two_batches_together_do_not_cover_what_neither_of_them_had():
    small = IDS[:1], MASKED[1:]
    assert not seen((IDS, WHOLE), small).cover((IDS, MASKED))


def test_other_batches_come_back_with_their_sizes_masks_and_ignored_labels():
    short = IDS[:, :3], MASKED[:, :3], LABELS[:, :3]
    (own, other) = seen(short).batches((IDS, WHOLE, IDS))
    assert all(a is b for a, b in zip(own, (IDS, WHOLE, IDS), strict=True))
    assert [tensor.shape for tensor in other] == [(2, 3)] * 3
    assert other[1].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert (other[2] == IGNORE_INDEX).tolist() == [[False] * 3, [False, False, True]]


def test_what_a_batch_covers_is_not_kept_beside_it():
    extents = seen((IDS[:1], WHOLE[:1]), (IDS, MASKED))
    assert len(extents.batches((IDS[:1], WHOLE[:1]))) == 2
    assert extents.batches((IDS, MASKED)) == [(IDS, MASKED)]


def test_batches_of_another_structure_are_apart_and_what_is_no_tensor_makes_no_difference():
    extents = seen((IDS, "a"))
    assert extents.cover((IDS, "b"))
    assert not extents.cover((IDS, IDS))
    assert not extents.cover((IDS,))
    assert extents.batches((IDS,)) == [(IDS,)]
