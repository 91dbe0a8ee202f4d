"""Trainings in tests leave out what takes longer than all the rest of a tiny one."""

import pytest


def leave_out_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, no page, a sample of one token; `train/test_run_files.py` has the whole of them."""
    monkeypatch.setattr("tightfit.train.pictures.memory_picture", lambda *_, **__: b"")
    monkeypatch.setattr("tightfit.train.pictures.plan_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.train.pictures.run_page", lambda *_, **__: "")
    monkeypatch.setattr("tightfit.train.run.SAMPLE_TOKENS", 1)
