"""The least that is taken out for a budget: found by dry runs before a weight is read, and kept by a real step."""

import itertools

import pytest
from tiny_sources import loaded, tiny_folder, tiny_model

from command_line import tightfit
from tightfit.errors import CannotFit, InputError
from tightfit.models.compress.pruning import fitting, pipeline
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, Removal
from tightfit.models.compress.pruning.fitting import Goal, first_that_fits, fitting_removal, removals_up_to
from tightfit.models.compress.pruning.pipeline import prune
from tightfit.recipes.table import describe_ways_out
from tightfit.step import TokenBatch
from tiny import allocator_peak


def test_removals_grow_in_every_part_from_nothing_to_the_limits():
    anatomy = Anatomy.of(tiny_model("qwen3").config)
    removals = removals_up_to(anatomy, Ratios(layers=0.5, ffn=0.75, heads=0.5, width=0.5))
    assert removals[0] == Removal()
    assert removals[-1] == Removal(layers=2, ffn=48, groups=2, hidden=16)
    for before, after in itertools.pairwise(removals):
        assert all(vars(after)[name] >= count for name, count in vars(before).items())
        assert before != after
    assert removals_up_to(anatomy, Ratios(heads=0.1)) == [Removal()]


@pytest.mark.keeps("fit-takes-out-least")
@pytest.mark.parametrize("first", range(9))
def test_the_search_finds_the_first_that_fits(first):
    asked = []
    assert first_that_fits(9, lambda number: (asked.append(number), number >= first)[1]) == first
    assert len(asked) <= 5


@pytest.mark.slow  # a search, and two trainings
@pytest.mark.keeps("fit-takes-out-least")
def test_a_step_of_the_pruned_model_fits_and_less_would_not(tmp_path, monkeypatch):
    source = tiny_folder(tmp_path / "model", tiny_model("qwen2", num_hidden_layers=2))
    limits, found = {"heads": 0.75}, []
    monkeypatch.setattr(pipeline, "fitting_removal", lambda *given: found.append(fitting_removal(*given)) or found[0])
    report = prune(source, to_fit="0.95x", seq_len=16, batch_size=2, output=tmp_path / "out", **limits)

    (fitted,) = found
    config, goal = loaded(source).config, Goal("0.95x", 16, batch_size=2)
    anatomy, budget = Anatomy.of(config), fitted.budget_bytes
    removals = removals_up_to(anatomy, Ratios(**limits))
    place = removals.index(fitted.removal)
    config_of = fitting.config_after
    smaller = fitting.predicted_peak(config_of(config, anatomy, removals[place - 1]), loaded(source).dtype, goal)
    assert fitted.peak_bytes <= budget < smaller
    model = loaded(tmp_path / "out")
    assert model.config.num_key_value_heads == 4 - fitted.removal.groups < 4
    measured = allocator_peak(model.train(), TokenBatch(2, 16, 300).tensors())
    assert report.after.step_peak_bytes == pytest.approx(measured, rel=1e-3)
    assert measured <= budget
    assert fitted.dry_runs <= 4
    assert "dry runs" in report.notes[0]


@pytest.mark.keeps("fit-takes-out-least")
def test_what_cannot_fit_says_the_least_and_leaves_no_folder(tmp_path):
    source = tiny_folder(tmp_path / "model", tiny_model("llama"))
    done = tightfit(
        "prune", source, "--to-fit", "1KiB", "--inference", "--seq-len", 16, "--ffn", 0.5, "--output", tmp_path / "out"
    )
    assert done.code == 3
    assert "with the most that may be taken out it needs" in done.error
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match=r"longer than the model.s 64 positions"):
        prune(source, to_fit="1GiB", seq_len=65, output=tmp_path / "out")
    with pytest.raises(InputError, match="--inference is for --to-fit"):
        prune(source, ffn=0.5, inference=True, output=tmp_path / "out")


@pytest.mark.slow  # ways out are plans of their own: half a minute
def test_a_refused_step_has_ways_out(tmp_path):
    source = tiny_folder(tmp_path / "model", tiny_model("llama"))
    with pytest.raises(CannotFit) as caught:
        prune(source, to_fit="0.45x", seq_len=32, batch_size=4, ffn=0.25, output=tmp_path / "out")
    assert caught.value.least_bytes > 0
    assert caught.value.ways_out
    assert "--" not in describe_ways_out(caught.value.ways_out, taken_by=caught.value.refusal.taken_by)


@pytest.mark.slow  # a second road through the same search
def test_a_generation_of_the_pruned_model_fits(tmp_path):
    source = tiny_folder(tmp_path / "model", tiny_model("qwen3_moe", mlp_only_layers=[]))
    report = prune(source, to_fit="0.6x", inference=True, seq_len=32, output=tmp_path / "out")
    assert report.after.measured_inference_peak_bytes <= 0.6 * report.before.inference_peak_bytes
    assert report.after.inference_peak_bytes == pytest.approx(report.after.measured_inference_peak_bytes, rel=1e-3)
