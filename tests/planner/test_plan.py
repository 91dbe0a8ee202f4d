"""A plan's peak is the allocator's, within the budget, and its gradients are the plain ones."""

import json
import re
from functools import cache

import pytest
import torch
from torch import nn

from tightfit import Plan, TokenBatch, plan, verify
from tightfit.errors import BudgetError, CannotFit, InputError, LeverError, ModelError
from tightfit.planner.levers import allowed_levers
from tightfit.planner.levers.micro_batch import PARTS_SPREAD
from tightfit.planner.report.words import alike
from tightfit.units import format_bytes, format_seconds
from tiny import allocator_peak, decoder, token_batch

BUDGETS = ("0.8x", "0.65x", "0.5x")


@cache
def planned(budget, levers="exact", precision="fp32"):
    """A plan for the decoder and the batch of most tests here, made once: plans are frozen."""
    return plan(decoder(), token_batch(8), budget, precision=precision, levers=levers)


@pytest.mark.keeps("plan-measured-peak-equals")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_measured_peak_is_the_planned_one_and_within_the_budget(budget, precision):
    from tightfit.step import StepSettings

    model, batch = decoder(), token_batch(8)
    made = planned(budget, "rounding", precision)
    with made.apply(model):
        measured = allocator_peak(model, batch, settings=StepSettings(precision), micro_batches=made.micro_batches)
    assert measured <= made.budget_bytes
    assert made.peak_bytes == pytest.approx(measured, rel=0.001)
    assert made.budget_bytes <= made.plain_peak_bytes * float(budget[:-1])


@pytest.mark.keeps("plan-bit-exact-levers")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_exact_plan_changes_no_bit(dropout):
    model, batch = decoder(dropout=dropout), token_batch(8)
    for budget in ("0.8x", "0.7x"):
        report = verify(model, batch, plan(model, batch, budget) if dropout else planned(budget))
        assert report.ok, str(report)
        assert report.planned_error is None


@pytest.mark.keeps("levers-exact-rounding-gradients")
@pytest.mark.slow  # a plan of every lever that rounds
def test_levers_exact_to_rounding_are_as_far_from_fp64_as_the_plain_run():
    model, batch = decoder(), token_batch(8)
    made = plan(model, batch, "0.45x", levers=["chunked_loss", "micro_batch"])  # no recompute, however fast it is
    assert made.micro_batches > 1
    report = verify(model, batch, made)
    assert report.ok, str(report)
    assert report.planned_error <= PARTS_SPREAD * report.plain_error


@pytest.mark.keeps("smaller-budget-never-larger")
@pytest.mark.slow  # a plan for each of many budgets; tests/planner/test_solve.py asks the solver alone
def test_the_peak_never_rises_when_the_budget_falls():
    model, batch = decoder(num_layers=2), token_batch(8)
    plain = plan(model, batch, "1x").plain_peak_bytes
    peaks = []
    for share in torch.linspace(1.0, 0.4, 12).tolist():
        try:
            made = plan(model, batch, int(share * plain), levers="rounding")
        except CannotFit:
            break
        assert made.peak_bytes <= made.budget_bytes
        peaks.append(made.peak_bytes)
    assert len(peaks) > 6
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow  # a plan whose search is cut
def test_a_choice_that_was_not_proved_to_be_the_fastest_says_how_far_from_it_it_may_be(monkeypatch):
    def not_proved(made):
        return [line for line in made.assumptions if line.startswith("the choice was not proved to be the fastest")]

    proved = planned("0.65x")
    monkeypatch.setattr("tightfit.planner.blocks.solve.FIRST_WIDTH", 2)
    monkeypatch.setattr("tightfit.planner.blocks.solve.WIDEST", 2)
    made = plan(decoder(), token_batch(8), "0.65x", levers="exact")
    (line,) = not_proved(made)
    stated = re.fullmatch(r".*: at most ([\d.]+) (µs|ms) a step from it", line)
    gap = float(stated[1]) * {"µs": 1e-6, "ms": 1e-3}[stated[2]]
    last_digit = 1e-4
    assert gap > 0  # whether the choice is slower after all depends on the prices
    assert -1e-9 < made.step_seconds - proved.step_seconds <= gap + last_digit
    assert f"Note: {line}." in str(made)
    assert not not_proved(proved)


@pytest.mark.keeps("budget-above-plain-peak")
def test_a_budget_above_the_plain_peak_changes_nothing():
    model, batch = decoder(), token_batch()
    made = plan(model, batch, "2x")
    assert made.peak_bytes == made.plain_peak_bytes
    assert all(choice.action == "keep" for choice in made.choices)


@pytest.mark.slow  # the least is searched
@pytest.mark.keeps("nothing-fits-error-names")
def test_what_cannot_fit_says_the_least_and_what_holds_it_up():
    model, batch = decoder(num_layers=2), token_batch(4)
    levers = ["recompute", "chunked_loss"]  # all that are exact to rounding take seven times as long
    with pytest.raises(CannotFit, match=r"the least is .* reached by .* held up in") as caught:
        plan(model, batch, "1MB", levers=levers)
    least = plan(model, batch, caught.value.least_bytes, levers=levers)
    assert least.peak_bytes <= caught.value.least_bytes
    assert caught.value.exit_code == 3


@pytest.mark.keeps("plan-read-json-equals")
def test_a_plan_survives_its_json(tmp_path):
    made = planned("0.5x", "rounding", "fp32")
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    raw = json.loads((tmp_path / "plan.json").read_text())
    assert raw["peak_bytes"] == made.peak_bytes


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"format": 0}')
    with pytest.raises(InputError, match="not a plan"):
        Plan.from_json(tmp_path / "plan.json")
    with pytest.raises(InputError, match="cannot be read"):
        Plan.from_json(tmp_path / "none.json")


@pytest.mark.keeps("plan-read-json-equals")
def test_a_plan_is_for_the_model_it_was_made_for():
    made = plan(decoder(), token_batch(), "2x")
    with pytest.raises(LeverError, match="plan again"):
        made.apply(decoder(hidden_size=32))


@pytest.mark.keeps("undo-restores-model-exactly")
def test_undo_restores_the_model():
    model = decoder()
    before = [dict(m.__dict__) for m in model.modules()]
    planned("0.5x", "rounding", "fp32").apply(model).undo()
    assert [dict(m.__dict__) for m in model.modules()] == before


class Lone(nn.Module):
    """No repeated blocks."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(900, 32), nn.Linear(32, 32), nn.Linear(32, 900)

    def forward(self, input_ids, labels):
        logits = self.head(self.mix(self.embedding(input_ids)).relu())
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_model_without_repeated_blocks_is_planned_by_loss_and_micro_batch():
    model, batch = Lone(), TokenBatch(8, 64, 900)
    made = plan(model, batch, "0.5x", levers="rounding")
    assert [choice.action for choice in made.choices] == ["keep"]  # the whole model, which is its only part
    assert made.peak_bytes <= made.budget_bytes
    with pytest.raises(CannotFit):
        plan(model, batch, "0.5x")


def test_wrong_arguments_are_told():
    model, batch = decoder(), token_batch()
    with pytest.raises(BudgetError, match="22GiB"):
        plan(model, batch, "22 parsecs")
    with pytest.raises(InputError, match="lever 'magic'"):
        plan(model, batch, "0.5x", levers=["magic"])
    with pytest.raises(InputError, match="precision"):
        plan(model, batch, "0.5x", precision="int3")
    with pytest.raises(ModelError, match="no scalar loss"):
        plan(model, {"input_ids": batch["input_ids"]}, "0.5x")
    with pytest.raises(LeverError, match="no module matches"):
        plan(model, batch, "0.5x", blocks="stages.*")


def test_the_table_says_plain_and_planned_each_block_and_what_was_not_taken():
    made = plan(decoder(), token_batch(8), "0.7x")
    rows = [" ".join(line.split()) for line in str(made).splitlines()]
    plain, planned = made.plain, made.planned

    def compared(name, before, after, form):
        return f"{name} {form(before)} {form(after)} {after / before:.0%}"

    assert compared("peak", plain.peak_bytes, planned.peak_bytes, format_bytes) in rows
    assert compared("step", plain.step_seconds, planned.step_seconds, format_seconds) in rows
    for category, before in plain.by_category.items():
        assert any(row.startswith(f"{category} {format_bytes(before)} ") for row in rows), category
    activations = plain.by_category["activations"], planned.by_category["activations"]
    assert compared("activations", *activations, format_bytes) in rows
    assert f"in {plain.peak_phase} {planned.peak_phase}" in rows

    busy = [choice for choice in made.choices if choice.action != "keep"]
    assert busy
    assert f"{len(busy)} of {len(made.choices)} blocks recompute something in backward." in rows
    for name, same in alike(made.choices):
        (row,) = [row for row in rows if row.startswith(f"{name} ")]
        assert format_bytes(sum(choice.kept_bytes for choice in same)) in row

    table = rows[next(i for i, row in enumerate(rows) if row.startswith("not taken")) :]
    for rejected in made.rejected:
        figures = "" if rejected.peak_bytes is None else f" {format_bytes(rejected.peak_bytes)} "
        assert any(row.startswith(f"{rejected.levers}{figures or ' '}") and rejected.reason in row for row in table)


@pytest.mark.keeps("budget-exactly-plain-peak")
@pytest.mark.slow  # two plans
def test_a_budget_of_exactly_the_plain_peak_needs_no_lever_and_holds_when_measured():
    model, batch = decoder(), token_batch()
    plain = plan(model, batch, "2x").plain_peak_bytes
    measured = allocator_peak(model, batch)
    for budget in ("1x", "1.0x", plain, f"{plain}B"):
        made = plan(model, batch, budget)
        assert made.peak_bytes == plain
        assert all(choice.action == "keep" for choice in made.choices)
        assert measured <= made.budget_bytes
    below = plan(model, batch, plain - 1)
    assert below.budget_bytes == plain - 1
    assert below.peak_bytes < plain


def test_a_class_of_levers_may_have_names_beside_it():
    assert allowed_levers(["rounding", "offload"]) == allowed_levers("rounding") | {"offload"}
    assert allowed_levers(("exact", "tile")) == {"recompute", "tile"}
    with pytest.raises(InputError, match="lever 'magic' is not known: choose exact, rounding, and any of"):
        plan(decoder(), token_batch(8), "0.5x", levers=["rounding", "magic"])
