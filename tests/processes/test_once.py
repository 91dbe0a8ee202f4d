"""What rank 0 finds for all ranks of somebody else's process group, over the group's store."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tightfit.errors import CannotFit, InputError, LeverError, PeerFailed, RankError
from tightfit.ranks.processes import once

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


class Member:
    """A rank's own view of a process group. Each test thread is a rank."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def on_ranks(monkeypatch):
    """Calls `found_once` on so many ranks, which meet in one store. Returns what each returns or raises."""
    place, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(once, "default_group", lambda: place.group)
    monkeypatch.setattr(once, "store_of_default_group", lambda: store)
    monkeypatch.setattr(once, "MEETING_SECONDS", 0.3)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call(work, facts=lambda rank: {"batch": "(2, 3)"}, size=2, coming=None):
        def one(rank):
            place.group = Member(rank, size)
            try:
                return once.found_once("a plan", facts(rank), lambda: work(rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(coming or size)))

    return call


def raising(error):
    def work(rank):
        raise error

    return work


def test_rank_0_finds_it_for_all_and_nobody_else_does(on_ranks):
    asked = []
    assert on_ranks(lambda rank: asked.append(rank) or "found", size=3) == ["found"] * 3
    assert asked == [0]


@pytest.mark.keeps("loop-your-own-ddp")
def test_ranks_that_differ_all_say_which_and_in_what(on_ranks):
    found = on_ranks(lambda rank: "found", lambda rank: {"model": "gpt", "batch": f"({rank + 2}, 3)"})
    assert [type(each) for each in found] == [RankError] * 2
    assert (
        str(found[0])
        == str(found[1])
        == ("rank 1 asks for a plan with another batch than rank 0 ((3, 3), not (2, 3)): give every rank the same")
    )


@pytest.mark.keeps("loop-your-own-ddp")
def test_a_rank_that_does_not_come_is_named(on_ranks):
    (found,) = on_ranks(lambda rank: "found", coming=1)
    assert type(found) is RankError
    assert "rank 1 has not asked for a plan within 0 seconds" in str(found)


@pytest.mark.keeps("loop-your-own-ddp")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LeverError("no room to offload to"), LeverError),
        (InputError("batch is a str"), InputError),
        (CannotFit("1 KiB cannot fit", 7, 9), CannotFit),
        (KeyError("layers"), PeerFailed),
    ],
)
def test_an_error_of_rank_0_is_raised_everywhere_and_shown_by_rank_0(on_ranks, capsys, error, kind):
    first, other = on_ranks(raising(error))
    assert first is error
    assert type(other) is kind
    assert str(error) in str(other)
    if kind is CannotFit:
        assert (other.least_bytes, other.taken_bytes, list(other.ways_out)) == (7, 9, [])
    sys.excepthook(type(other), other, None)
    assert capsys.readouterr().err == ""
    sys.excepthook(type(first), first, None)
    assert str(error) in capsys.readouterr().err


def test_what_arrives_changed_is_refused(on_ranks, monkeypatch):
    written = json.dumps
    monkeypatch.setattr(once.json, "dumps", lambda said: written(said).replace("found it", "lost it"))
    first, other = on_ranks(lambda rank: "found it")
    assert first == "found it"
    assert "arrived changed" in str(other)
