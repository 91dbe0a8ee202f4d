"""A lever that one file of the tests registers stands wherever levers are listed, and no other file knows of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lever_of_a_user import BOUND, HalvedModules, lever_in_force

import tightfit
from tightfit import Plan
from tightfit.errors import ConfigError, InputError
from tightfit.planner.levers import find
from tightfit.planner.levers.page import levers_page
from tightfit.training.config import parse_config
from tiny import allocator_peak, decoder, token_batch

SENTENCE = "3 feed-forwards hold in bf16 what backward reads."
PATHS = ("layers.0.mlp", "layers.1.mlp", "layers.2.mlp")


@pytest.fixture(autouse=True)
def registered():
    with lever_in_force():
        yield


@pytest.fixture
def made():
    return tightfit.plan(decoder(), token_batch(), "0.9x", levers=["halved"])


@pytest.mark.keeps("lever-registered-file-appears")
def test_a_plan_takes_it_and_its_peak_is_what_the_allocator_sees(made):
    assert made.levers == (HalvedModules(PATHS),)
    model = decoder()
    with made.apply(model):
        assert allocator_peak(model, token_batch()) == made.peak_bytes < made.budget_bytes
    assert "forward" not in model.layers[0].mlp.__dict__


@pytest.mark.slow  # a plan and its page
def test_it_is_left_out_where_it_is_not_named_and_tables_say_so():
    plan = tightfit.plan(decoder(), token_batch(), "0.9x", levers="rounding")
    assert find(plan.levers, HalvedModules) is None
    assert ("halved", "not among the levers that were allowed") in [(r.levers, r.reason) for r in plan.rejected]


def test_tables_and_pages_have_its_sentence(made, tmp_path):
    assert SENTENCE in str(made)
    made.to_html(tmp_path / "plan.html")
    assert SENTENCE in (tmp_path / "plan.html").read_text("utf-8")
    assert f"| `halved` | {HalvedModules.summary} | inexact | an error of {BOUND:g} more" in levers_page()


def test_a_plan_with_it_is_written_and_read(made, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["levers"] == [{"name": "halved", "paths": list(PATHS)}]
    assert Plan.from_json(tmp_path / "plan.json") == made


@pytest.mark.keeps("lever-registered-file-appears")
def test_verify_judges_it_by_the_bound_that_it_states(made, monkeypatch):
    report = tightfit.verify(decoder(), token_batch(), made)
    assert report.ok
    assert report.plain_error < 1e-5 < report.planned_error < BOUND
    assert f"{BOUND:g} that inexact levers state" in str(report)
    monkeypatch.setattr(HalvedModules, "bound", 1e-6)
    report = tightfit.verify(decoder(), token_batch(), made)
    assert not report.ok
    assert "NOT EQUAL" in str(report)


def test_the_configuration_takes_its_name():
    assert parse_config({}, ["memory.levers=[exact, halved]"]).memory.levers == ("exact", "halved")
    with pytest.raises(ConfigError, match=r"wanted 'recompute', .*'halved'"):
        parse_config({}, ["memory.levers=[halve]"])
    with pytest.raises(InputError, match=r"any of .*halved"):
        tightfit.plan(decoder(), token_batch(), "0.9x", levers=["halve"])


@pytest.mark.keeps("lever-registered-file-appears")
@pytest.mark.slow  # every remedy is priced
def test_the_doctor_offers_it_with_its_price():
    found = tightfit.diagnose(tightfit.estimate(decoder(), token_batch()), model=decoder(), batch=token_batch())
    offered = next(remedy for remedy in found.remedies if remedy.name == "feed-forwards halved")
    model = decoder()
    with tightfit.plan(model, token_batch(), "0.9x", levers=["halved"]).apply(model):
        assert offered.peak_bytes == allocator_peak(model, token_batch())
    assert offered.exactness == "inexact"
    assert 'levers=["halved"]' in offered.python


@pytest.mark.keeps("lever-registered-file-appears")
@pytest.mark.slow  # an interpreter of its own
def test_the_help_of_the_command_line_names_it():
    program = (
        "import sys; sys.path[:0] = sys.argv[1:2]; from lever_of_a_user import HalvedModules, register; "
        "register(HalvedModules); sys.argv[:] = ['tightfit', 'plan', '--help']; from tightfit.cli import main; main()"
    )
    here = str(Path(__file__).parent)
    outcome = subprocess.run([sys.executable, "-c", program, here], capture_output=True, text=True, check=True)
    assert "halved" in outcome.stdout


def test_a_name_that_is_taken_is_refused():
    from tightfit.planner.levers import register

    with pytest.raises(ValueError, match="there is a lever 'halved' already"):
        register(HalvedModules)


def test_a_lever_that_cannot_be_applied_leaves_nothing_on_the_model(made):
    model = decoder()
    taken = tightfit.recompute(model, "layers.2.mlp")
    with pytest.raises(tightfit.errors.LeverError):
        made.apply(model)
    taken.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(*(parameter.detach() for parameter in (model.head.weight, decoder().head.weight)))
