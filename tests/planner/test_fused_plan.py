"""A plan that may compile and recompute compiles blocks under its own choices, which differ from block to block."""

import copy
import json
from dataclasses import replace

import pytest

import tightfit
from made_up_devices import even
from tightfit import Plan
from tightfit.levers.captured import CapturedForward
from tightfit.planner.levers import CapturedBlocks, CompiledBlocks, Recompute
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tiny import allocator_peak, decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
]

LEVERS = ["recompute", "compile"]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=4, hidden_size=128)


@pytest.fixture(scope="module")
def batch():
    return token_batch(8)


@pytest.fixture(scope="module")
def made(model, batch):
    return tightfit.plan(model, batch, "0.5x", levers=LEVERS, device=even())


def forwards(model):
    return [vars(layer).get("forward") for layer in model.layers]


@pytest.mark.keeps("plan-recompute-compile-decides")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_it_takes_the_planned_bytes_is_as_exact_as_plain_and_faster_than_recorded_blocks(model, batch, made):
    recorded = tightfit.plan(model, batch, "0.5x", levers=["recompute"], device=even())
    assert made.step_seconds < recorded.step_seconds
    assert made.lever(CompiledBlocks).paths == tuple(f"layers.{n}" for n in range(4))
    assert len({choice.kept for choice in made.choices}) > 1, "blocks choose for themselves"
    with made.apply(model):
        assert [(forward.fused, forward.refused) for forward in forwards(model)] == [(True, None)] * 4
        assert allocator_peak(copy.deepcopy(model), batch) == made.peak_bytes <= made.budget_bytes - UNSEEN_BYTES
    report = tightfit.verify(model, batch, made)
    assert report.ok, str(report)
    assert report.planned_error is not None
    assert forwards(model) == [None] * 4


@pytest.mark.slow  # compiles for a second for each set
def test_its_file_is_read_again_and_says_what_compiled_blocks_keep(made, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert [choice["compiled"] for choice in raw["choices"]] == [True] * 4
    assert {choice["share"] for choice in raw["choices"]} == {None}
    text = str(made)
    assert "4 of 4 blocks run as compiled code." in text
    assert "(compiled)" in text


@pytest.mark.keeps("beside-plain-recorded-captured")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_blocks_may_be_compiled_captured_recorded_and_plain_in_one_plan(model, batch, made):
    kept = next(choice for choice in made.choices if choice.action == "operators")
    choices = (
        replace(kept, path="layers.0"),
        replace(kept, path="layers.1", compiled=False, captured=True),
        replace(kept, path="layers.2", compiled=False),
    )
    levers = (Recompute(), CompiledBlocks((), ("layers.0",)), CapturedBlocks(("layers.1",)))
    mixed = replace(made, choices=choices, levers=levers)
    with mixed.apply(model):
        assert [getattr(forward, "fused", None) for forward in forwards(model)] == [True, False, None, None]
        assert isinstance(forwards(model)[1], CapturedForward)
        assert tightfit.estimate(model, batch).peak_bytes == allocator_peak(copy.deepcopy(model), batch)
    assert Plan.from_dict(json.loads(json.dumps(mixed.to_dict()))) == mixed


@pytest.mark.keeps("plan-recompute-compile-decides")
@pytest.mark.slow  # compiles for a second for each set
def test_dropout_is_kept_and_so_it_can_be_compiled():
    dropping, batch = decoder(num_layers=2, hidden_size=64, dropout=0.1).train(), token_batch(8)
    plan = tightfit.plan(dropping, batch, "0.65x", levers=LEVERS, device=even())
    assert plan.lever(CompiledBlocks).paths == ("layers.0", "layers.1")
    with plan.apply(dropping):
        assert allocator_peak(copy.deepcopy(dropping), batch) == plan.peak_bytes
