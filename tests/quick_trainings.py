"""Trainings in tests leave out what takes longer than all the rest of a tiny one."""

from collections.abc import Callable

import pytest


def leave_out_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, and no step under the allocator's record, for tests that are about neither."""
    leave_out_pictures(monkeypatch)

    def unmeasured(step: Callable[[], object], resident: object) -> int:
        step()
        return 1

    monkeypatch.setattr("tightfit.training.loop.measured_peak", unmeasured)


def leave_out_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, no page, a sample of one token; `training/test_run_files.py` has the whole of them."""
    monkeypatch.setattr("tightfit.training.pictures.memory_picture", lambda *_, **__: b"")
    monkeypatch.setattr("tightfit.training.pictures.plan_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.training.pictures.run_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.training.run.SAMPLE_TOKENS", 1)
