"""The batches that a plan must hold for are the worst that can come."""

import copy

import pytest
import torch
from tiny_trainings import padded
from torch import nn

from round_device import round_device
from tightfit.errors import CannotFit, InputError
from tightfit.integrations.batches import all_labels_counted, checked_length, distinct, with_padding, worst_batches
from tightfit.integrations.planning import GuestStep, plan_for_all, plan_one, tightened
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.planner.request import Request


def rows(*lengths):
    return [{"input_ids": list(range(1, length + 1))} for length in lengths]


def test_all_labels_count_but_one_where_some_are_ignored():
    batch = padded(rows(5, 2))
    counted = all_labels_counted(batch)
    assert (counted["labels"] == IGNORE_INDEX).nonzero().tolist() == [[1, 4]]
    assert counted["labels"][0].equal(batch["labels"][0])
    assert (batch["labels"] == IGNORE_INDEX).sum() == 3
    assert all(counted[name] is batch[name] for name in ("input_ids", "attention_mask"))


def test_a_batch_of_which_every_label_counts_is_left_as_it_is():
    batch = padded(rows(5, 5))
    assert all_labels_counted(batch) is batch


def test_padding_is_one_masked_token_in_each_sample_that_had_none():
    batch = with_padding(padded(rows(4, 4)))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert batch["labels"].tolist() == [[1, 2, 3, IGNORE_INDEX]] * 2
    ragged = padded(rows(4, 2))
    assert all(with_padding(ragged)[name].equal(value) for name, value in ragged.items())


def test_batches_of_one_shape_are_told_apart_by_masks_and_by_ignored_labels():
    whole, ragged = padded(rows(4, 4)), padded(rows(4, 2))
    prompted = {**whole, "labels": ragged["labels"]}
    assert len(distinct([whole, ragged, prompted, whole])) == 3


def test_a_length_that_is_named_is_tried_with_padding_too():
    batches = worst_batches(rows(3, 3, 2), 2, padded, max_length=6)
    shapes = [(tuple(batch["input_ids"].shape), bool(batch["attention_mask"].all())) for batch in batches]
    assert shapes == [((2, 3), True), ((2, 6), True), ((2, 6), False)]


@pytest.mark.parametrize("length", [0, -5, 1.5, "64"])
def test_a_length_that_is_none_is_one_line(length):
    with pytest.raises(InputError, match=r"max_length=.*: give the longest sequence in tokens, 1 or more"):
        checked_length(length)
    assert (checked_length(64), checked_length(None)) == (64, None)


class BesideBlocks(nn.Module):
    """Four blocks over `inside`, and something over `beside` that no block could recompute."""

    def __init__(self):
        super().__init__()
        block = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
        self.layers = nn.ModuleList(nn.Sequential(*copy.deepcopy(block)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inside, beside):
        for layer in self.layers:
            inside = inside + layer(inside)
        return inside.square().mean() + (beside * self.scale).sin().cos().mean()


LONG = {"inside": torch.ones(4, 256, 64), "beside": torch.ones(4, 1)}


def wide(width):
    return {"inside": torch.ones(4, 64, 64), "beside": torch.ones(4, width)}


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr("tightfit.devices.present.present", lambda *_, **__: round_device())  # always one choice
    model = BesideBlocks()
    return GuestStep(
        Request.of(model, None, optimizer=torch.optim.AdamW(model.parameters()), device=torch.device("cpu"))
    )


def peaks_under(step, plan, *batches):
    with plan.apply(step.model):
        return [step.step_figures(batch, 1).peak_bytes for batch in batches]


@pytest.mark.keeps("chunked-loss-measured-peak")
def test_what_a_plan_predicts_is_of_the_batch_that_takes_most_under_it(step):
    other = wide(51_000)
    plan = plan_for_all(step, [other, LONG], "0.7x")
    assert plan.plain_peak_bytes == step.step_figures(LONG, 1).peak_bytes > step.step_figures(other, 1).peak_bytes
    of_long, of_wide = peaks_under(step, plan, LONG, other)
    assert plan.peak_bytes == of_wide > of_long


@pytest.mark.keeps("trainings-transformers-lightning-too")
def test_the_steps_to_come_count_for_batches_of_one_shape(step, monkeypatch):
    counted = []

    def refused(asked, budget):
        counted.append(asked.steps)
        raise CannotFit("nothing fits", 2)

    monkeypatch.setattr("tightfit.integrations.planning.plan_asked", refused)
    for batches in ([LONG], [LONG, copy.deepcopy(LONG)], [LONG, wide(16)]):
        with pytest.raises(CannotFit):
            plan_for_all(step.but(steps=70), batches, 1)
    assert counted == [70, 70, None]


@pytest.mark.keeps("guest-plan-fits-batch")
@pytest.mark.slow  # a plan for each batch
def test_where_no_plan_for_the_largest_batch_fits_all_one_for_another_does(step):
    other = wide(56_000)
    plan = plan_for_all(step, [other, LONG], "0.7x")
    assert tightened(step, plan_one(step, LONG, plan.budget_bytes), LONG, [other]) is None
    assert max(peaks_under(step, plan, LONG, other)) == plan.peak_bytes <= plan.budget_bytes


@pytest.mark.keeps("guest-plan-fits-batch")
@pytest.mark.slow  # a plan for each batch
def test_where_no_plan_fits_all_what_another_batch_takes_is_told(step):
    with pytest.raises(
        CannotFit, match=r"the plan for the longest batch does not fit another one, which needs .* under"
    ):
        plan_for_all(step, [wide(62_000), LONG], "0.7x")
