"""A plan may compile blocks where that is named; what it says of bytes is what the allocator records."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import tightfit
from command_line import tightfit as command
from tightfit import Plan
from tightfit.errors import CannotFit
from tightfit.planner.levers.compiled import SHARES, CompiledBlocks
from tightfit.planner.request import Tracer
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.largest import maximise
from tiny import allocator_peak, decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=4, hidden_size=128)


@pytest.fixture(scope="module")
def batch():
    return token_batch(8)


@pytest.fixture(scope="module")
def made(model, batch):
    return tightfit.plan(model, batch, "0.6x", levers=["compile"])


def shares(plan):
    return {choice.share for choice in plan.choices if choice.action == "compile"}


@pytest.mark.keeps("levers-exact-rounding-gradients", "memory-compiled-blocks-cpu")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_the_measured_peak_is_the_planned_one_and_gradients_are_as_exact(model, batch, made):
    with made.apply(model):
        assert made.peak_bytes == allocator_peak(model, batch) <= made.budget_bytes
    report = tightfit.verify(model, batch, made)
    assert report.ok, str(report)
    assert report.worst is None
    assert report.planned_error is not None


def with_shares(plan, shares):
    """The plan with other shares, as it stands without being chosen."""
    choices = [replace(choice, share=share) for choice, share in zip(plan.choices, shares, strict=True)]
    compiled = CompiledBlocks(tuple((choice.path, choice.share) for choice in choices))
    return replace(plan, choices=tuple(choices), levers=(compiled,))


@pytest.mark.slow  # compiles for each share
def test_it_takes_the_largest_share_that_fits_in_as_many_blocks_as_it_does(model, batch, made):
    assert {choice.action for choice in made.choices} == {"compile"}

    def step(shares):
        with with_shares(made, shares).apply(model):
            return tightfit.estimate(model, batch)

    def fits(shares):
        return step(shares).peak_bytes + UNSEEN_BYTES <= made.budget_bytes

    at = next(i for i, share in enumerate(SHARES) if fits([share] * 4))
    assert at > 1, "more than one share is too much for all blocks"
    low, *higher = SHARES[at], SHARES[at - 1], SHARES[0]
    mixed = [[low] * (4 - last) + [high] * last for high in higher for last in (1, 2, 3)]
    fastest = min(([low] * 4, *filter(fits, mixed)), key=lambda shares: step(shares).step_seconds)
    assert [choice.share for choice in made.choices] == fastest
    assert len(set(fastest)) == 2, "else nothing is mixed"
    assert made.step_seconds == pytest.approx(step(fastest).step_seconds)


@pytest.mark.slow  # compiles for each share
def test_below_the_least_it_says_so_and_at_the_least_there_is_a_plan(model, batch):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.05x", levers=["compile"])
    least = caught.value.least_bytes
    assert "all blocks compiled" in str(caught.value)
    found = tightfit.plan(model, batch, least, levers=["compile"])
    assert found.peak_bytes <= least


@pytest.mark.slow  # compiles for each share
@pytest.mark.parametrize("faster", ["compile", "recompute"])
def test_it_is_one_of_several_levers_and_the_faster_one_is_taken(model, batch, made, faster, monkeypatch):
    if faster == "recompute":
        slow_compiled_code(monkeypatch)
    alone = {
        lever: tightfit.plan(model, batch, "0.6x", levers=[lever]).step_seconds for lever in ("recompute", "compile")
    }
    found = tightfit.plan(model, batch, "0.6x", levers=["recompute", "compile"])
    assert min(alone, key=alone.get) == faster
    assert (found.lever(CompiledBlocks) is not None) == (faster == "compile")
    if faster == "compile":  # under the plan's own choices, which are finer than shares
        assert found.step_seconds < alone[faster]
    else:
        assert found.step_seconds == pytest.approx(alone[faster])
    assert any(("compiled" in rejected.levers) != (faster == "compile") for rejected in found.rejected)


def slow_compiled_code(monkeypatch):
    """Compiled blocks take a second more each."""
    whole = Tracer.whole

    def slower(self, combination, *rest, **how):
        trace = whole(self, combination, *rest, **how)
        if combination.get(CompiledBlocks) is None:
            return trace
        first, *others = trace.operators
        return replace(trace, operators=(first._replace(seconds=first.seconds + 1), *others))

    monkeypatch.setattr(Tracer, "whole", slower)


@pytest.mark.slow  # two plans, one with compiled blocks
def test_it_is_used_only_where_it_is_named(model, batch):
    assert not shares(tightfit.plan(model, batch, "0.6x", levers="rounding"))


@pytest.mark.slow  # compiles for each share
def test_a_plan_survives_its_file_and_reads_well(made, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    share = made.choices[0].share
    text = str(made)
    assert "4 of 4 blocks run as compiled code." in text
    assert f"{share:.0%} of what compiled code would keep" in text
    assert json.loads((tmp_path / "plan.json").read_text())["choices"][0]["share"] == share


@pytest.mark.slow  # compiles for each share
def test_the_curve_has_its_points(model, batch):
    curve = tightfit.curve(model, batch, levers=["compile"], points=1)
    assert any("compiled" in point.levers for point in curve.points)
    assert curve.points[-1].peak_bytes < curve.points[0].peak_bytes


@pytest.mark.slow  # each batch is compiled for: half a minute
def test_the_largest_batch_is_asked_for_with_it_too(model):
    def case(size):
        return model, token_batch(size)

    budget = tightfit.estimate(model, token_batch(4)).peak_bytes
    found = maximise(case, budget, levers=["compile"], at_most=16)
    assert found.value > 4


class InParts(nn.Module):
    """A block that the compiler does not take as a whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.linear(x).tanh() + x


def test_a_block_that_cannot_be_compiled_as_a_whole_is_told_and_not_taken():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(InParts() for _ in range(4))), (torch.randn(64, 16),)
    found = tightfit.plan(
        model, batch, "0.97x", levers=["compile", "recompute"], loss=lambda m, b: m(*b).square().sum()
    )
    assert not shares(found)
    assert any("cannot be compiled as a whole" in rejected.reason for rejected in found.rejected)


@pytest.mark.slow  # compiles for each share
def test_the_command_line_takes_it():
    sizes = ("model.num_layers=2", "model.hidden_size=64", "training.batch_size=16", "data.max_documents=20")
    outcome = command("plan", "examples/quickstart.yaml", "memory.budget=0.95x", "memory.levers=[compile]", *sizes)
    assert outcome.code == 0, outcome.err
    assert "blocks run as compiled code" in outcome.out
