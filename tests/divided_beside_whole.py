"""Ranks in processes of their own that compute one batch together, beside one process that computes all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE.parent / 'src'}:{HERE}", "OMP_NUM_THREADS": "1"}
PLAIN = {
    "model": "decoder", "shape": {}, "steps": 2, "micro_batches": 1, "precision": "fp32", "budget": None, "clip": None,
    "nodes": 1, "own_rows": False,
}  # fmt: skip


def case_of(model="decoder", *, parallel, shape=None, **settings):
    return {**PLAIN, "parallel": parallel, "model": model, "shape": shape or {}, **settings}


def run(folder, size, cases):
    """What each rank tells of each case."""
    words = [sys.executable, str(HERE / "ranks" / "divided_ranks.py"), str(folder), str(size), json.dumps(cases)]
    ended = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def demand_alike(ranks, cases):
    for told in ranks:
        assert len(told) == len(cases)
        for row, asked in zip(told, cases, strict=True):
            near = 1e-5 if asked["precision"] == "fp32" else 1e-2
            # In 16 bits FSDP2 rounds each logit, and autocast does not.
            of_loss = near / 5 if asked["parallel"] == "tp" else near
            assert row["losses"] == pytest.approx(row["whole"], rel=of_loss), asked
            assert row["worst"] <= (2 * near if asked["own_rows"] else near) * row["largest"], asked
            assert row["saved"] is not False, asked
            if asked["clip"] is not None:
                assert row["norms"] == pytest.approx(row["whole_norms"], rel=1e-5), asked
                assert row["norms"][0] > asked["clip"], "something was clipped"
            if asked["budget"] is not None:
                assert row["planned"] == row["losses"], asked
                assert row["equal"] == row["names"], asked
