"""`tightfit run` where there is nothing to run on, and the allocator's history read backwards."""

import pytest
import torch

import tightfit
from tightfit.errors import DeviceError
from tightfit.training.monitoring.cards.history import History, UsedMemory


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch's CUDA build can run")
def test_a_build_for_a_cpu_alone_is_refused_in_one_line():
    with pytest.raises(DeviceError, match=r"needs PyTorch's CUDA build, and this is .*tightfit estimate"):
        tightfit.run(["python", "train.py"], device="rtx4090")


def event(action, address, size, module=""):
    return {"action": action, "addr": address, "size": size, "user_metadata": module}


EVENTS = [
    event("alloc", 1, 10),
    event("alloc", 2, 100, "block"),
    event("free_completed", 2, 100),
    event("alloc", 2, 30, "head"),
    event("free_completed", 7, 5),  # older than the history
    event("alloc", 3, 4),
]


def history(first=0):
    final = [UsedMemory(1, 10), UsedMemory(2, 30), UsedMemory(3, 4), UsedMemory(9, 1)]
    return History(EVENTS[first:], final, last=54)


def test_levels_are_right_from_the_end_on_however_much_of_the_beginning_is_lost():
    levels = [level for _, _, level in history().levels()][::-1]
    assert levels == [16, 116, 16, 46, 41, 45]
    for first in range(len(EVENTS)):
        assert [level for _, _, level in history(first).levels()][::-1] == levels[first:]


def test_the_highest_event_of_each_span_of_allocations():
    assert history().highest([(50, 51), (51, 52), (52, 53), (53, 54)]) == [0, 1, 3, 5]
    assert history().highest([(50, 54)]) == [1]
    assert history().highest([(54, 54)]) == [None]


def test_the_blocks_at_a_point_are_named_by_their_own_allocations():
    found = {block.address: block for block in history().in_use(1)}
    assert {address: block.bytes for address, block in found.items()} == {1: 10, 2: 100, 7: 5, 9: 1}
    assert (found[2].module, found[2].number) == ("block", 52)
    assert found[9].number == 0
    assert {block.module for block in history().in_use(5)} == {"", "head"}
