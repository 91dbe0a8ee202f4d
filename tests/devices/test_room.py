"""Measurements of a card within a share of its free memory, and what happens where that is too little."""

import json

import pytest
import torch

from tightfit.devices import present, room
from tightfit.devices.calls import (
    AttentionCase,
    ProductCase,
    StreamCase,
    smaller_attention,
    smaller_product,
    smaller_stream,
)
from tightfit.devices.families import Family
from tightfit.devices.known import closest
from tightfit.devices.room import NoRoom, largest_that_fits
from tightfit.devices.timing import fastest

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def halved(size):
    return size // 2 or None


def test_a_size_that_finds_no_room_is_halved_until_it_does():
    def made(size):
        if size > 10:
            raise FULL
        return "made"

    assert largest_that_fits(64, made, halved) == (8, "made")
    with pytest.raises(NoRoom):
        largest_that_fits(64, lambda size: (_ for _ in ()).throw(FULL), halved)
    with pytest.raises(RuntimeError, match="another fault"):
        largest_that_fits(64, lambda size: (_ for _ in ()).throw(RuntimeError("another fault")), halved)


@pytest.mark.parametrize(
    ("case", "smaller"),
    [
        (ProductCase("batched", torch.float32, 8, 32, 32, 32), smaller_product),
        (ProductCase("nt", torch.float32, 1, 64, 128, 32), smaller_product),
        (AttentionCase(True, True, torch.bfloat16, 32, 4096, 128), smaller_attention),
        (StreamCase(Family.COPY, torch.float32, torch.float32, 2**20), smaller_stream),
    ],
)
def test_every_case_becomes_smaller_until_nothing_is_left(case, smaller):
    sizes = []
    while case is not None:
        sizes.append(torch.tensor([value for value in case if isinstance(value, int)]).prod().item())
        case = smaller(case)
    assert len(sizes) > 2
    assert sizes == sorted(set(sizes), reverse=True)


def test_a_call_that_runs_out_of_memory_has_no_time_and_the_others_have():
    def full():
        raise FULL

    calls = {"runs": lambda: None, "full": full, "runs too": lambda: None}
    assert set(fastest(calls, "cpu", 0.0, 2)) == {"runs", "runs too"}
    with pytest.raises(ZeroDivisionError):
        fastest({"broken": lambda: 1 / 0}, "cpu", 0.0, 2)


def test_the_share_is_of_what_is_free_and_the_users_own_limit_comes_back(monkeypatch):
    limits = [0.9]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: limits[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(room, "clear_cublas_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40, 100))
    with room.share_of_free_memory():
        assert limits[-1] == pytest.approx(0.2)
    assert limits[-1] == 0.9


@pytest.mark.parametrize(("name", "like"), [("Tesla T4", "T4"), ("a card that nobody knows", "T4")])
def test_a_card_without_room_has_published_figures_which_are_not_kept(monkeypatch, tmp_path, name, like):
    def full(kind):
        raise NoRoom

    said = []
    monkeypatch.setattr(present, "calibrate", full)
    monkeypatch.setattr(present, "device_name", lambda kind: name)
    monkeypatch.setattr(present, "_here", lambda kind: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 15 * 2**30))
    monkeypatch.setattr(present, "cache_path", lambda kind: tmp_path / "figures.json")
    spec = present.measure("cuda", said.append)
    assert (spec.name, spec.memory_bytes, spec.compute_capability) == (name, 15 * 2**30, (7, 5))
    assert not spec.is_measured
    assert spec.roofline == closest("t4", (7, 5), 0).roofline
    assert f"the published figures of {like}" in said[-1]
    assert not (tmp_path / "figures.json").exists()
    assert json.dumps(spec.to_dict())
