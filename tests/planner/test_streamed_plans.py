"""Plans that stream frozen weights: chosen within the budget, as predicted, bit-equal, and only where named."""

import pytest
import torch

import tightfit
from adapted_blocks import built, of_batch
from exactness import assert_bit_equal, run
from tightfit.errors import CannotFit
from tightfit.memory.allocator import measured_peak
from tightfit.planner.levers import Stream
from tightfit.planner.levers.stream import spread
from tightfit.training.loop import resident_tensors

BLOCKS = 6


def asked(**how):
    model, x = built()
    return model, {"x": x.detach()}, {"loss": of_batch, "device": "cpu", **how}


def peak_of(model, batch, applied):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step():
        applied.backward(batch, of_batch)
        optimizer.step()
        optimizer.zero_grad()

    step(), step()
    return measured_peak(step, resident_tensors(model, optimizer, batch))


@pytest.mark.keeps("streamed-peak")
@pytest.mark.parametrize("share", [0.9, 0.7, 0.6])
def test_a_plan_streams_as_many_blocks_as_the_budget_requires(share):
    model, batch, how = asked(levers=["exact", "stream"])
    least = tightfit.plan(model, batch, "1GiB", **{**how, "levers": "exact"}).plain_peak_bytes
    plan = tightfit.plan(model, batch, int(share * least), **how)
    lever = plan.lever(Stream)
    assert plan.peak_bytes <= plan.budget_bytes
    if share == 0.6:
        assert lever is not None
    assert lever is None or set(lever.paths) <= {choice.path for choice in plan.choices}
    again = tightfit.Plan.from_dict(plan.to_dict())
    assert again == plan
    with again.apply(model) as applied:
        assert peak_of(model, batch, applied) == plan.peak_bytes


def test_the_class_exact_alone_streams_nothing():
    model, batch, how = asked()
    plan = tightfit.plan(model, batch, "1GiB", **how)
    with pytest.raises(CannotFit) as failure:
        tightfit.plan(model, batch, int(0.6 * plan.plain_peak_bytes), levers="exact", **how)
    assert "stream" not in str(failure.value)


def test_a_planned_step_is_bit_equal():
    model, batch, how = asked(levers=["exact", "stream"])
    plain_peak = tightfit.plan(model, batch, "1GiB", **how).plain_peak_bytes
    plan = tightfit.plan(model, batch, int(0.6 * plain_peak), **how)

    def loss(model, x):
        return of_batch(model, {"x": x})

    assert plan.lever(Stream) is not None
    assert_bit_equal(run(*built(), loss, times=3), run(*built(), loss, times=3, levers=plan.apply))
    assert tightfit.verify(model, batch, plan, loss=of_batch).ok


def test_a_model_without_frozen_blocks_says_why_it_streams_nothing():
    model, batch, how = asked(levers=["exact", "stream"], optimizer="sgd")
    how["device"] = "rtx4090"  # on a CPU trained weights stream too
    model.requires_grad_(True)
    batch = {"x": batch["x"].repeat(512, 1, 1)}
    plain_peak = tightfit.plan(model, batch, "1GiB", **how).plain_peak_bytes
    plan = tightfit.plan(model, batch, plain_peak - 4096, **how)
    why = "no block has frozen weights of its own: train adapters, or update on the host (offloaded_adamw)"
    assert ("stream", why) in [(each.levers, each.reason) for each in plan.rejected]


def test_streamed_blocks_are_spread_evenly():
    paths = [f"layers.{number}" for number in range(6)]
    assert spread(paths, 2) == ["layers.0", "layers.3"]
    assert spread(paths, 6) == paths
    assert all(len(set(spread(paths, count))) == count for count in range(1, 7))
