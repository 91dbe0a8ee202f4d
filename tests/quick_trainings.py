"""Trainings in tests leave out what takes longer than all the rest of a tiny one."""

import pytest


def leave_out_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, no page, a sample of one token; `training/test_run_files.py` has the whole of them."""
    monkeypatch.setattr("tightfit.training.pictures.memory_picture", lambda *_, **__: b"")
    monkeypatch.setattr("tightfit.training.pictures.plan_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.training.pictures.run_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.training.run.SAMPLE_TOKENS", 1)
