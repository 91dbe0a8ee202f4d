"""A training whose budget is too small: what it leaves, and the ways out that its configuration can take."""

import shlex

import pytest
from tiny_training import settings

from quick_trainings import leave_out_pictures
from tightfit.errors import CannotFit
from tightfit.recipes import choices
from tightfit.recipes.table import describe_ways_out
from tightfit.training.api import train
from tightfit.training.config import parse_config


@pytest.fixture
def refused(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "find_spec", lambda name: name if name == "peft" else None)
    leave_out_pictures(monkeypatch)
    config = settings(tmp_path, memory={"budget": "1000KiB", "levers": "exact"})
    with pytest.raises(CannotFit) as caught:
        train(config)
    return config, caught.value


@pytest.mark.slow  # ways out, and a training with each
@pytest.mark.keeps("training-refused-ways-out")
def test_the_overrides_of_a_way_out_train_within_the_budget(refused):
    config, error = refused
    ways = error.ways_out.fitting
    exact = next(way for way in ways if way.overrides and way.kind in ("exact", "rounding"))
    result = train(config, shlex.split(exact.overrides))
    assert result.measured_peak_bytes <= 1000 * 1024
    shown = describe_ways_out(error.ways_out, taken_by="overrides")
    assert f"1. {ways[0].overrides}" in shown
    assert "--" not in shown


@pytest.mark.slow  # two refused trainings with their ways out
@pytest.mark.keeps("training-refused-ways-out")
def test_a_model_with_new_weights_is_neither_adapted_nor_converted(refused):
    _, error = refused
    names = [way.name for way in error.ways_out]
    assert names
    assert not [name for name in names if "adapters" in name or "bf16 weights" in name]


@pytest.mark.keeps("training-refused-ways-out")
def test_a_folder_that_was_made_for_nothing_is_removed(refused, tmp_path):
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CannotFit):
        train(settings(tmp_path, memory={"budget": "1KB", "levers": "exact"}))
    assert (tmp_path / "run").is_dir()


@pytest.mark.slow  # peft is imported, and a model adapted in dry runs
def test_a_model_that_is_loaded_may_be_adapted(tmp_path, monkeypatch):
    leave_out_pictures(monkeypatch)
    train(settings(tmp_path, training={"max_steps": 1}))
    budget = {"budget": "620KiB", "levers": "exact"}
    asked = settings(tmp_path, memory=budget, output={"folder": str(tmp_path / "second")})
    asked = parse_config(asked.model_dump(mode="json") | {"model": {"path": str(tmp_path / "run")}})
    with pytest.raises(CannotFit) as caught:
        train(asked)
    names = [way.name for way in caught.value.ways_out]
    assert len(names) == len(set(names))  # none is run dry twice
    adapted = next(way for way in caught.value.ways_out.fitting if "adapters" in way.name)
    assert adapted.overrides.startswith("'model.adapter={")
    assert train(asked, shlex.split(adapted.overrides)).measured_peak_bytes <= 620 * 1024
