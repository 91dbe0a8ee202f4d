"""A plan that may compile and capture chooses between both, and recorded blocks, for each block in one solution."""

import copy
from dataclasses import replace

import pytest

import tightfit
from made_up_devices import even
from tightfit import Plan
from tightfit.levers.captured import CapturedForward
from tightfit.planner.levers import CapturedBlocks, CompiledBlocks
from tightfit.planner.search import fusing
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tiny import allocator_peak, decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
]

# Operators of captured blocks are so much faster here that some blocks are faster captured, and others compiled.
DEVICE = replace(even(), captured_seconds=-5e-5)


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=4, hidden_size=128)


@pytest.fixture(scope="module")
def batch():
    return token_batch(8)


def planned(model, batch, *levers, budget="0.5x"):
    return tightfit.plan(model, batch, budget, levers=["recompute", *levers], device=DEVICE)


@pytest.fixture(scope="module")
def made(model, batch):
    return planned(model, batch, "capture", "compile")


def forwards(model):
    return [vars(layer).get("forward") for layer in model.layers]


@pytest.mark.keeps("beside-plain-recorded-captured")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_compiled_and_captured_blocks_take_the_planned_bytes_together_and_are_faster_than_either(model, batch, made):
    captured, compiled = made.lever(CapturedBlocks), made.lever(CompiledBlocks)
    assert captured is not None
    assert compiled is not None
    assert sorted((*captured.paths, *compiled.paths)) == [f"layers.{n}" for n in range(4)]
    for alone in ("capture", "compile"):
        assert made.step_seconds < planned(model, batch, alone).step_seconds
    with made.apply(model):
        assert [forward.fused for forward in forwards(model)] == [choice.compiled for choice in made.choices]
        assert {type(forward) for forward in forwards(model)} == {CapturedForward}
        measured = allocator_peak(copy.deepcopy(model), batch)
        assert [forward.refused for forward in forwards(model)] == [None] * 4
    assert measured == made.peak_bytes <= made.budget_bytes - UNSEEN_BYTES
    report = tightfit.verify(model, batch, made)
    assert report.ok, str(report)
    assert forwards(model) == [None] * 4


@pytest.mark.slow  # compiles for a second for each set
def test_its_file_is_read_again_and_says_both(made, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    text = str(made)
    assert "blocks run as compiled code." in text
    assert "blocks run as captured programs." in text


@pytest.mark.keeps("beside-plain-recorded-captured")
@pytest.mark.slow  # compiles for a second for each set
@pytest.mark.parametrize("budget", ["0.5x", "0.55x", "0.6x"])
def test_both_together_are_no_slower_than_either_alone(model, batch, budget):
    both = planned(model, batch, "capture", "compile", budget=budget)
    for alone in ("capture", "compile"):
        assert both.step_seconds <= planned(model, batch, alone, budget=budget).step_seconds


@pytest.mark.slow  # compiles for a second for each set
def test_a_block_that_cannot_be_captured_is_compiled_or_recorded(model, batch, made, monkeypatch):
    captured = made.lever(CapturedBlocks)
    assert captured is not None
    monkeypatch.setattr(fusing, "reject_refused", lambda selection: dict.fromkeys(captured.paths, "not this one"))
    without = planned(model, batch, "capture", "compile")
    assert not any(choice.captured for choice in without.choices if choice.path in captured.paths)
    assert without.peak_bytes <= without.budget_bytes - UNSEEN_BYTES
