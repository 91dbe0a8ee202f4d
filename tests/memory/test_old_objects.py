"""Objects that exist when a plan begins are taken out of the collector's sight once, and given back once."""

import gc

import pytest

from tightfit.memory.allocator import old_objects_left_alone


@pytest.fixture
def calls(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: found.append("count") or 0)
    monkeypatch.setattr(gc, "freeze", lambda: found.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: found.append("unfreeze"))
    return found


def test_contexts_within_one_another_freeze_once(calls):
    with old_objects_left_alone(), old_objects_left_alone(), pytest.raises(KeyError), old_objects_left_alone():
        raise KeyError
    assert calls == ["count", "freeze", "unfreeze"]
    with old_objects_left_alone():
        pass
    assert calls[3:] == calls[:3]


def test_of_two_contexts_that_overlap_the_last_one_gives_them_back(calls):
    first, second = old_objects_left_alone(), old_objects_left_alone()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert calls == ["count", "freeze"]
    second.__exit__(None, None, None)
    assert calls == ["count", "freeze", "unfreeze"]


def test_what_somebody_else_froze_stays_frozen(calls, monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 3)
    with old_objects_left_alone():
        pass
    assert calls == []
