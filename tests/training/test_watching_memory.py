"""What is measured of a step is held against what was predicted: a plan that is above its budget is corrected."""

import json
from dataclasses import replace

import pytest
from recovering import Awkward, Remembered, batch, config, plain_fit, planner_of, training

from tightfit.errors import CannotFit
from tightfit.ranks.processes.ranks import Ranks
from tightfit.training.corrections import Corrections, corrections_of, corrections_of_all
from tightfit.training.stepper import StepMeasured


@pytest.fixture(scope="module")
def fits():
    """A loose plan and a tighter one."""
    planner = planner_of(Awkward(), config())
    peak = plain_fit().planned.peak_bytes
    return planner.within(batch(1), 2 * peak), planner.within(batch(1), int(0.95 * peak))


def observed(fitted, *peaks, planner=None):
    run = training(planner or Remembered([fitted]), fitted=fitted)
    for number, peak in enumerate(peaks, start=2):
        run.stepper.observe(batch(number), StepMeasured(number, 0.001, peak, is_settled=False))
    return run


def test_a_peak_that_was_predicted_says_nothing(fits):
    run = observed(fits[0], fits[0].planned.peak_bytes, fits[0].planned.peak_bytes + 500)
    assert run.notes == []


@pytest.mark.keeps("measured-peak-above-predicted")
def test_a_peak_above_prediction_and_within_budget_is_reported_once(fits):
    peak = fits[0].planned.peak_bytes + 10_000
    run = observed(fits[0], peak, peak, peak)
    assert len(run.notes) == 1
    assert "step 2" in run.notes[0]
    assert "10,000 bytes above the predicted one" in run.notes[0]
    assert run.stepper.corrections == Corrections()


@pytest.mark.keeps("measured-peak-above-predicted")
def test_a_peak_beyond_the_budget_is_answered_with_a_plan_that_leaves_room_for_the_difference(fits):
    loose, tight = fits
    budget = loose.planned.peak_bytes + 2_000
    loose = replace(loose, plan=replace(loose.plan, budget_bytes=budget))
    planner = Remembered([tight])
    run = observed(loose, budget + 3_000, planner=planner)
    assert planner.asked == [budget - 5_000]
    assert run.stepper.levers.fitted.planned == tight.planned
    assert run.stepper.levers.fitted.budget_bytes == budget, "the user's"
    assert "a plan takes over that leaves room for it" in run.notes[0]


def test_where_nothing_tighter_fits_the_training_goes_on_and_says_so(fits):
    class Full(Remembered):
        def within(self, batch, budget_bytes, **options):
            raise CannotFit("nothing fits", least_bytes=10**12)

    loose = replace(fits[0], plan=replace(fits[0].plan, budget_bytes=fits[0].planned.peak_bytes))
    run = observed(loose, loose.planned.peak_bytes + 5_000, planner=Full([]))
    assert "there is no tighter plan" in run.notes[0]
    assert run.stepper.levers.fitted is loose


@pytest.mark.keeps("resumed-run-begins-plan")
def test_corrections_survive_json(fits):
    corrections = Corrections(plan=fits[1].plan, bound_bytes=5, one_by_one=True, failures=2, loosened=1)
    again = Corrections.from_dict(json.loads(json.dumps(corrections.to_dict())))
    assert again == corrections
    assert Corrections.from_dict(json.loads(json.dumps(Corrections().to_dict()))) == Corrections()
    with pytest.raises(TypeError):
        Corrections.from_dict({"plan": None, "other": 1})


@pytest.mark.keeps("resumed-run-ranks-begins")
def test_each_rank_has_its_own_corrections_back():
    own = [Corrections(failures=1), Corrections(one_by_one=True)]

    class First(Ranks):
        size = 2

        def gathered(self, content):
            return [content, json.dumps(own[1].to_dict()).encode()]

    stored = json.loads(json.dumps(corrections_of_all(First(), own[0])))
    assert [corrections_of(stored, rank) for rank in range(2)] == own
    with pytest.raises(LookupError):  # of fewer ranks
        corrections_of(stored, 2)
    before = own[0].to_dict()  # in checkpoints of earlier versions: that of rank 0, for all
    assert [corrections_of(before, rank) for rank in range(2)] == [own[0]] * 2
