import pytest

from tightfit.training.config import TrainingConfig
from tightfit.training.schedule import learning_rate, moved_schedule


def rates(**settings: object) -> list[float]:
    training = TrainingConfig.model_validate(
        {"learning_rate": 1.0, "min_lr_ratio": 0.1, "max_steps": 100, "warmup_steps": 10, **settings}
    )
    return [learning_rate(step, training) for step in range(1, training.max_steps + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_warm_up_rises_evenly_to_the_highest_rate(schedule: str):
    assert rates(schedule=schedule)[:10] == pytest.approx([0.1 * step for step in range(1, 11)])


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_the_last_step_has_the_last_rate(schedule: str, last: float):
    assert rates(schedule=schedule)[-1] == pytest.approx(last)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_rate_never_rises_after_the_warm_up(schedule: str):
    after = rates(schedule=schedule)[9:]

    assert after == sorted(after, reverse=True)


def test_cosine_is_half_way_down_in_the_middle():
    assert rates(schedule="cosine", warmup_steps=0, max_steps=101)[50] == pytest.approx(0.55)


def test_wsd_is_stable_for_four_fifths_and_then_falls_in_a_line():
    after = rates(schedule="wsd", warmup_steps=0, max_steps=101)

    assert after[:81] == pytest.approx([1.0] * 81)
    assert after[90] == pytest.approx(0.55)


def test_without_a_warm_up_the_first_step_has_the_highest_rate():
    assert rates(warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_training_that_is_all_warm_up_ends_at_the_highest_rate(schedule: str):
    assert rates(schedule=schedule, max_steps=10)[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_single_step_has_the_highest_rate(schedule: str):
    assert rates(schedule=schedule, max_steps=1, warmup_steps=0) == [1.0]


def test_a_longer_end_that_moves_the_rate_is_said_and_another_is_not():
    training = TrainingConfig(max_steps=100, learning_rate=1e-3, min_lr_ratio=0.1)
    line = moved_schedule(50, 50, training)
    assert "max_steps was 50 and is 100" in line
    assert f"from 0.0001 in step 50 to {learning_rate(51, training):.3g}" in line
    assert moved_schedule(100, 50, training) is None
    assert moved_schedule(50, 50, training.model_copy(update={"schedule": "constant"})) is None
    assert moved_schedule(99, 10, training) is None, "the rates are alike"
