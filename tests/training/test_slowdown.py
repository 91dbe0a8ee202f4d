"""A plan that is measured slower than allowed gives way to a looser one that fits, computes the same and is faster."""

import time
from dataclasses import replace

import pytest
import torch
from recovering import BATCH, Awkward, Remembered, batch, config, plain_fit, planner_of, training

from tightfit.planner.levers import MicroBatches
from tightfit.training.corrections import Corrections
from tightfit.training.fitting import LeversInForce
from tightfit.training.slowdown import LOOKS, STEPS, Pace, TimedStep
from tightfit.training.stepper import StepMeasured


@pytest.fixture(scope="module")
def fits():
    """A plan without levers, and one that recomputes, both within a budget that the plain step fits."""
    planner = planner_of(Awkward(), config())
    peak = plain_fit().planned.peak_bytes
    loose, tight = planner.within(batch(1), 2 * peak), planner.within(batch(1), int(0.95 * peak))
    assert loose.plan.choices != tight.plan.choices
    return [replace(each, plan=replace(each.plan, budget_bytes=2 * peak)) for each in (loose, tight)]


class Clock:
    """Seconds of a pass by whether a block recomputes under it, in the place of the machine's, which is shared."""

    def __init__(self, monkeypatch, plain, planned):
        self.seconds = {False: plain, True: planned}
        self.passes = []

        def one_pass(timed, part, count):
            recomputes = any("forward" in vars(block) for block in timed._stepper.model.blocks)
            self.passes.append((recomputes, len(part["input_ids"]), count))
            real(timed, part, count)
            return self.seconds[recomputes]

        real = TimedStep._one_pass
        monkeypatch.setattr(TimedStep, "_one_pass", one_pass)


class Planner(Remembered):
    def plain_peak_bytes(self, batch):
        return 1


def slow_training(fitted, planner, corrections=None, limit=0.5, seconds=2.0):
    run = training(planner, fitted=fitted)
    run.stepper.max_slowdown = limit
    run.stepper._pace = Pace(limit)
    run.stepper.corrections = corrections or Corrections()
    run.stepper.attempt(batch(1), 1)
    for number in range(2, 2 + STEPS):
        run.stepper.observe(batch(number), StepMeasured(number, seconds, None, is_settled=True))
    return run


@pytest.mark.slow  # two plans within a training
def test_a_plan_that_memory_had_tightened_gives_half_of_it_back(fits, monkeypatch):
    loose, tight = fits
    Clock(monkeypatch, plain=1.0, planned=2.0)
    planner = Planner([loose])
    bound = tight.planned.peak_bytes
    run = slow_training(tight, planner, Corrections(plan=tight.plan, bound_bytes=bound, failures=1))
    half = (bound + tight.budget_bytes) // 2
    assert planner.asked == [half]
    assert run.stepper.levers.fitted.plan.choices == loose.plan.choices
    assert run.stepper.corrections.loosened == 1
    assert run.stepper.corrections.bound_bytes == half
    assert "100% slower than the plain one" in run.notes[0]
    assert "a looser plan takes over, 50% faster" in run.notes[0]


@pytest.mark.keeps("plan-measured-slower-memory")
def test_the_executors_overhead_is_priced_as_measured(fits, monkeypatch):
    loose, tight = fits
    Clock(monkeypatch, plain=1.0, planned=2.0)

    class Pricing(Planner):
        def within(self, batch, budget_bytes, *, overhead=1.0, **options):
            factors.append(overhead)
            return super().within(batch, budget_bytes, **options)

    factors = []
    run = slow_training(tight, Pricing([loose]))
    predicted = tight.plan.step_seconds - tight.plan.plain.step_seconds
    assert factors == [pytest.approx(1.0 / predicted)]
    assert run.stepper.levers.fitted.plan.choices == loose.plan.choices


def test_looser_plans_are_made_for_the_model_without_its_levers(fits, monkeypatch):
    """Under the levers in force, the plain step would seem to fit."""
    loose, tight = fits
    Clock(monkeypatch, plain=1.0, planned=2.0)
    under_levers = []

    class Looking(Planner):
        def within(self, batch, budget_bytes, **options):
            under_levers.append(bool(applied))
            return super().within(batch, budget_bytes, **options)

    applied: list[str] = []
    enter, leave = LeversInForce.__enter__, LeversInForce.__exit__
    monkeypatch.setattr(LeversInForce, "__enter__", lambda self: [applied.append("levers"), enter(self)][1])
    monkeypatch.setattr(LeversInForce, "__exit__", lambda self, *e: [applied.clear(), leave(self, *e)][1])
    slow_training(tight, Looking([loose]))
    assert under_levers == [False]


@pytest.mark.keeps("plan-measured-slower-memory")
def test_a_looser_plan_that_computes_other_bits_is_not_taken(fits, monkeypatch):
    """A training's numbers must not depend on the clock."""
    loose, tight = fits
    Clock(monkeypatch, plain=1.0, planned=2.0)
    split = replace(loose, plan=replace(loose.plan, levers=(MicroBatches(2),)), micro_batches=2)
    run = slow_training(tight, Planner([split]))
    assert run.stepper.levers.fitted is tight
    assert "no looser plan" in run.notes[0]


@pytest.mark.keeps("plan-measured-slower-memory")
def test_a_looser_plan_that_is_no_faster_is_not_taken(fits, monkeypatch):
    loose, tight = fits
    clock = Clock(monkeypatch, plain=1.0, planned=2.0)
    run = training(Planner([loose]), fitted=tight)
    timed = TimedStep(run.stepper, run.stepper._state, run.stepper.levers, lambda part: 1)
    assert timed.planned_seconds(batch(1), BATCH, loose) == 1.0
    clock.seconds[False] = 1.99
    run = slow_training(tight, Planner([loose]), limit=0.0)
    assert run.stepper.levers.fitted is tight


@pytest.mark.keeps("plan-measured-slower-memory")
def test_a_busy_machine_is_no_slow_plan(fits, monkeypatch):
    """Plain and planned passes take equally long: the steps take longer than predicted for another reason."""
    Clock(monkeypatch, plain=2.0, planned=2.0)
    run = slow_training(fits[1], Planner([fits[0]]), seconds=2.0)
    assert run.notes == []
    assert run.stepper.levers.fitted is fits[1]
    assert run.stepper._pace.looks == 1


def test_without_a_limit_or_with_fast_steps_nobody_looks(fits, monkeypatch):
    clock = Clock(monkeypatch, plain=1.0, planned=2.0)
    slow_training(fits[1], Planner([fits[0]]), limit=None)
    slow_training(fits[1], Planner([fits[0]]), seconds=fits[1].plain.step_seconds)
    assert clock.passes == []


def test_a_training_is_looked_at_only_a_few_times():
    pace = Pace(0.5)
    looks = 0
    for _ in range(100):
        if pace.is_slow(2.0, 1.0):
            looks += 1
            pace.looks += 1
    assert looks == LOOKS


@pytest.mark.keeps("plan-measured-slower-memory")
def test_a_look_leaves_everything_as_it_was(fits, monkeypatch):
    """Gradients, buffers, random states and what modules hold: the next step computes what it would have."""
    Clock(monkeypatch, plain=2.0, planned=2.0)
    wanted = training(Planner([fits[0]]), fitted=fits[1])
    losses = [wanted.stepper.attempt(batch(number), number).loss for number in (1, 2)]
    left = wanted.everything()
    run = slow_training(fits[1], Planner([fits[0]]))
    assert run.stepper._pace.looks == 1
    assert all(parameter.grad is None for parameter in run.stepper.model.parameters())
    assert run.stepper.attempt(batch(2), 2).loss == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(run.everything(), left, strict=True))


def test_the_part_that_is_timed_is_the_largest_that_fits_without_a_plan(fits):
    run = training(Planner([fits[0]]), fitted=fits[1])
    sizes = []

    def peak_bytes(part):
        sizes.append(len(part["input_ids"]))
        return fits[1].budget_bytes * len(part["input_ids"]) // 2

    part = TimedStep(run.stepper, run.stepper._state, run.stepper.levers, peak_bytes).part_that_fits(batch(1))
    assert len(part["input_ids"]) == 2
    assert sizes == [4, 2]


def test_the_seconds_are_the_machines():
    begun = time.perf_counter()
    settings = config()
    fitted = plain_fit(settings)
    run = training(Planner([fitted]), fitted=fitted)
    timed = TimedStep(run.stepper, run.stepper._state, run.stepper.levers, lambda part: 1)
    seconds = timed.plain_seconds(batch(1))
    assert 0 < seconds < time.perf_counter() - begun
