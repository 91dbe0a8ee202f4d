"""The ways out of five cases that cannot fit, each applied: planned in full for cards, measured on the CPU."""

import pytest
import torch

import tightfit
from tightfit.errors import CannotFit
from tightfit.models.loading import build_model
from tightfit.names import OPTIMIZERS
from tightfit.recipes.ways import WaysOut
from tightfit.step import StepSettings, TokenBatch
from tightfit.training.config.schema import PretrainedModel
from tiny import allocator_peak, decoder, token_batch

pytestmark = pytest.mark.slow  # each way is planned in full: a minute for each case, several for 8B


def refused(model, batch, budget, **how):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, budget, **how)
    return caught.value


def built(name):
    section = PretrainedModel(path=name, random_init=True, dtype="fp32")
    return tightfit.build_dry(lambda: build_model(section))


CARDS = {
    "8B on an H200, in 100 GiB": ("llama-3.1-8b", 128256, "h200", "100GiB", (1, 1024)),
    "0.5B on an RTX 3060, in 6 GiB": ("qwen2.5-0.5b", 151936, "rtx3060", "6GiB", (1, 512)),
    "1B on an RTX 4090, all of it": ("tinyllama-1.1b", 32000, "rtx4090", "80%", (4, 2048)),
}


@pytest.mark.parametrize("case", CARDS)
def test_on_a_card_every_way_has_a_plan_within_the_budget(case):
    name, vocabulary, device, budget, (size, length) = CARDS[case]
    batch = TokenBatch(size, length, vocabulary)
    error = refused(built(name), batch, budget, device=device, precision="bf16")
    found = error.ways_out
    assert isinstance(found, WaysOut)
    assert len(found.fitting) >= 3, found
    for way in found.fitting:
        plan = way.plan()
        assert plan.peak_bytes <= plan.budget_bytes == error.refusal.search.budget_bytes
        print(f"{case}: {way.name}: {way.peak_bytes / 2**30:.2f} GiB, planned {plan.peak_bytes / 2**30:.2f} GiB")


def test_8b_has_the_ways_that_people_take():
    name, vocabulary, device, budget, (size, length) = CARDS["8B on an H200, in 100 GiB"]
    error = refused(built(name), TokenBatch(size, length, vocabulary), budget, device=device, precision="bf16")
    found = error.ways_out
    names = " / ".join(way.name for way in found.fitting)
    for said in ("offloaded_adamw", "bf16 weights", "low-rank adapters"):
        assert said in names
    assert any(name in names for name, facts in OPTIMIZERS.items() if facts.changes == "8-bit states")
    # Weights and states take 89.75 GiB. Autocast keeps a bf16 copy of each weight until forward ends: 14.96 GiB more.
    (stepping,) = [way for way in found.ways if way.name == "step in backward"]
    assert not stepping.fits
    assert stepping.needed_bytes > 104 * 2**30


WIDE = {"hidden_size": 128, "num_layers": 3}
MEASURED = {
    "held by states": (WIDE, (1, 16), "0.87x", {}),
    "held by activations": ({}, (4, 96), "0.6x", {"levers": ["tile"]}),
}


@pytest.mark.parametrize("case", MEASURED)
def test_on_the_cpu_every_way_is_within_the_budget_that_the_allocator_measures(case):
    shape, (size, length), budget, how = MEASURED[case]
    batch = token_batch(size, length)
    error = refused(decoder(**shape), batch, budget, **how)
    limit = error.refusal.search.budget_bytes
    fitting = error.ways_out.fitting
    assert len(fitting) >= 2
    for way in fitting:
        step = way.asked.step
        if step.step_in_backward:
            continue  # tests/recipes/test_ways_out.py measures it
        names = {"model": decoder(**shape), "batch": batch, "torch": torch}
        exec(way.python, names)
        plan, model = names["plan"], names["model"]
        settings = StepSettings(step.precision)
        optimizer = plan.optimizer if isinstance(step.optimizer, str) else step.optimizer
        with plan.apply(model):
            peak = allocator_peak(
                model, names["batch"], optimizer=optimizer, settings=settings, micro_batches=plan.micro_batches
            )
        print(f"{case}: {way.name}: predicted {plan.peak_bytes}, measured {peak}, budget {limit}")
        assert peak <= limit
        assert peak == pytest.approx(plan.peak_bytes, rel=0.001, abs=1024)


def test_a_model_that_fits_nowhere_says_so():
    error = refused(built("llama-3.1-70b"), TokenBatch(64, 131072, 128256), "8GiB", device="rtx3060", levers=[])
    found = error.ways_out
    assert [way.kind for way in found.fitting] in ([], ["device"])
    assert "no card of the list has room" in found.sentence or "smallest card" in found.sentence
