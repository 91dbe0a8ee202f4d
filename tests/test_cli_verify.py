import json

import pytest

from command_line import tightfit
from tightfit.verification import Difference, Verification

DECODER = ("--model", "models_by_name:decoder", "--batch-size", 2, "--seq-len", 64)


def test_a_plan_for_a_budget_is_made_and_verified():
    outcome = tightfit("verify", *DECODER, "--budget", "0.9x")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("bit-equal: ")


def test_a_plan_from_a_file_is_verified_if_it_was_made_for_this_model(tmp_path):
    file = tmp_path / "plan.json"
    tightfit("plan", *DECODER, "--budget", "0.9x", "--output", file)
    assert tightfit("verify", *DECODER, "--plan", file).code == 0
    other = tightfit("verify", "--model", "models_by_name:Flat", "--seq-len", 8, "--plan", file)
    assert other.code == 2
    assert "made for a model with other parameters" in other.error


@pytest.mark.keeps("input-mistake-prints-line")
def test_a_plan_that_changes_something_has_its_own_exit_code_and_is_told(monkeypatch):
    broken = Verification(False, True, 9, Difference("gradient of head.weight", 0.25, "recompute", "layers.1"))
    monkeypatch.setattr("tightfit.cli.subject.verify", lambda *args, **kwargs: broken)
    outcome = tightfit("verify", *DECODER, "--budget", "2x")
    assert outcome.code == 4
    assert outcome.error == "NOT EQUAL: gradient of head.weight differs by up to 0.25, caused by recompute in layers.1"


def test_a_plan_file_that_is_not_there_or_not_a_plan_is_refused(tmp_path):
    file = tmp_path / "plan.json"
    assert "the plan cannot be read" in tightfit("verify", *DECODER, "--plan", file).error
    file.write_text(json.dumps({"format": 1}))
    assert "not a plan" in tightfit("verify", *DECODER, "--plan", file).error


def test_a_plan_and_a_budget_are_too_much():
    assert "keep one of them" in tightfit("verify", *DECODER, "--plan", "plan.json", "--budget", "0.5x").error
