"""Micro-batches only where a batch's loss is the weighted sum of its samples': tried on real numbers before a plan."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tightfit
from tightfit.errors import CannotFit, LeverError
from tightfit.planner.levers import MicroBatches
from tightfit.planner.separation import refuse_coupled
from tightfit.step import TokenBatch, model_loss
from tiny import decoder, token_batch

pytestmark = pytest.mark.keeps("plan-takes-micro-batches")


class Net(nn.Module):
    def __init__(self, last: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(dropout)) for _ in range(3)
        )
        self.last = last or nn.Identity()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def batch(size=32):
    torch.manual_seed(1)
    return torch.randn(size, 16), torch.randn(size, 16), torch.arange(size) % (size // 2)


def error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def of_samples(model, batch):
    return error(model, batch).mean()


def of_pairs(model, batch):
    return F.cross_entropy(model(batch[0]) @ model(batch[1]).T, torch.arange(len(batch[0])))


def of_groups(model, batch):
    values = error(model, batch)
    return torch.zeros(16).index_add(0, batch[2], values).square().mean()


def of_advantages(model, batch):  # as in GRPO: 0, whatever the samples, and its gradient is not
    rewards, likely = batch[1].sum(1), model(batch[0]).mean(1)
    return -((likely - likely.detach()).exp() * (rewards - rewards.mean())).mean()


def of_noise(model, batch):
    return of_samples(model, (batch[0] + torch.randn_like(batch[0]), *batch[1:]))


def of_a_little_variance(model, batch):
    found = model(batch[0])
    return of_samples(model, batch) + (1e-3 * found.var(0).mean() if len(found) > 1 else 0)


def of_the_root(model, batch):
    return of_samples(model, batch).sqrt()


def of_a_sum(model, batch):
    return error(model, batch).sum()


def of_weights_too(model, batch):
    return of_samples(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())


COUPLED = {
    "pairs": (Net(), of_pairs, "couples the samples"),
    "groups": (Net(), of_groups, "couples the samples"),
    "advantages": (Net(), of_advantages, "couples the samples"),
    "a little variance": (Net(), of_a_little_variance, "couples the samples"),
    "the root": (Net(), of_the_root, "couples the samples"),
    "a sum": (Net(), of_a_sum, "loss.reduction = 'sum'"),
    "noise": (Net(), of_noise, "random numbers"),
    "batch norm": (Net(nn.BatchNorm1d(16)), of_samples, "cannot be computed"),
}
APART = {
    "samples": (Net(), of_samples),
    "dropout": (Net(dropout=0.5), of_samples),
    "weights too": (Net(), of_weights_too),
    "layer norm": (Net(nn.LayerNorm(16)), of_samples),
    "batch norm at rest": (Net(nn.BatchNorm1d(16)).eval(), of_samples),
}


OWN_GENERATORS = {
    "PyTorch's": (torch.Generator, lambda own, shape: torch.randn(shape, generator=own)),
    "numpy's": (numpy.random.default_rng, lambda own, shape: torch.from_numpy(own.standard_normal(shape)).float()),
    "numpy's old ones": (numpy.random.RandomState, lambda own, shape: torch.from_numpy(own.randn(*shape)).float()),
    "Python's": (random.Random, lambda own, shape: torch.tensor([own.gauss(0, 1) for _ in range(shape[0])])[:, None]),
}


@pytest.mark.parametrize("whose", OWN_GENERATORS)
def test_noise_from_a_generator_of_the_models_own_is_refused(whose):
    made, draw = OWN_GENERATORS[whose]
    model = Net()
    model.own = made()

    def of_own_noise(model, batch):
        return of_samples(model, (batch[0] + draw(model.own, batch[0].shape), *batch[1:]))

    with pytest.raises(LeverError, match="random numbers"):
        refuse_coupled(model, batch(), of_own_noise)


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_samples_is_refused_with_its_reason(name):
    model, loss, reason = COUPLED[name]
    with pytest.raises(LeverError, match=reason):
        refuse_coupled(model, batch(), loss)


def of_rare_classes(model, batch):
    counts = torch.bincount(batch[2], minlength=32).clamp_min(1).to(batch[0].dtype)
    return F.cross_entropy(model(batch[0]), batch[2] % 16, weight=1 / counts[:16])


def of_those_that_came_once(model, batch):
    _, places, counts = batch[2].unique(return_inverse=True, return_counts=True)
    return (error(model, batch) / counts[places]).mean()


@pytest.mark.parametrize("loss", [of_rare_classes, of_those_that_came_once])
def test_a_loss_that_counts_within_the_batch_is_refused_where_every_count_is_one(loss):
    inputs, targets, _ = batch(8)
    with pytest.raises(LeverError, match="couples the samples"):
        refuse_coupled(Net(), (inputs, targets, torch.arange(8)), loss)


@pytest.mark.parametrize("name", APART)
def test_other_losses_are_not(name):
    model, loss = APART[name]
    refuse_coupled(model, batch(), loss)


@pytest.mark.parametrize("distance", [1, 7, 40, 60])
def test_two_samples_that_meet_are_found_at_any_distance(distance):
    def of_neighbours(model, batch):
        own = model(batch[0]).sum(1)
        return torch.stack([own[i] * own[i + distance] for i in range(len(own) - distance)] or [own.sum()]).mean()

    def by_number(model, batch):
        same = batch[2][:, None] == batch[2][None]
        return (model(batch[0]) @ model(batch[0]).T * same).mean()

    numbers = torch.arange(64) % distance
    for loss in (of_neighbours, by_number):
        with pytest.raises(LeverError):
            refuse_coupled(Net(), (*batch(64)[:2], numbers), loss)


def test_a_mean_over_rows_is_not_weighted_by_tokens():
    model = decoder()

    def of_rows(model, batch):
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        rows = [F.cross_entropy(row, own, ignore_index=-100) for row, own in zip(logits, labels, strict=True)]
        return torch.stack(rows).mean()

    refuse_coupled(model, token_batch(), model_loss)
    with pytest.raises(LeverError, match="weighted by its valid tokens"):
        refuse_coupled(model, token_batch(), of_rows)
    of_rows.count = lambda batch: len(batch["labels"])
    refuse_coupled(model, token_batch(), of_rows)


def test_a_plan_leaves_micro_batches_out_and_says_why():
    levers = ["micro_batch", "recompute"]
    plan = tightfit.plan(Net(), batch(256), "0.9x", loss=of_pairs, levers=levers)
    assert plan.micro_batches == 1
    (reason,) = [each.reason for each in plan.rejected if each.levers == MicroBatches.title]
    assert "couples the samples" in reason
    with pytest.raises(CannotFit, match="micro batch is left out: the loss couples"):
        tightfit.plan(Net(), batch(256), "0.2x", loss=of_pairs, levers=levers)
    split = tightfit.plan(Net(), batch(256), "0.9x", loss=of_samples, levers=["micro_batch"])
    assert split.micro_batches > 1
    assert split.lever(MicroBatches).tried


@pytest.mark.slow  # a search that ends without a plan
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "loss"), [(Net(nn.BatchNorm1d(16)), of_samples), (Net(), of_pairs)], ids=["batch norm", "contrastive"]
)
def test_nobody_is_advised_to_split_what_cannot_be(model, loss):
    plan = tightfit.plan(model, batch(256), "0.9x", loss=loss, levers="rounding")
    assert plan.micro_batches == 1
    assert tightfit.verify(model, batch(256), plan, loss=loss).ok
    step = tightfit.estimate(model, batch(256), loss=loss)
    advice = tightfit.diagnose(step, model=model, batch=batch(256), loss=loss).remedies
    assert advice
    assert not [remedy.name for remedy in advice if "micro-batch" in remedy.name]


def test_the_doctor_advises_micro_batches_where_samples_are_apart():
    step = tightfit.estimate(Net(), batch(256), loss=of_samples)
    advice = tightfit.diagnose(step, model=Net(), batch=batch(256), loss=of_samples).remedies
    assert [remedy.name for remedy in advice if "micro-batch" in remedy.name]


def test_a_plan_made_without_numbers_is_tried_by_its_first_backward():
    with torch.device("meta"):
        shape = Net()
    made = [tightfit.plan(shape, batch(256), "0.9x", loss=of, levers=["micro_batch"]) for of in (of_samples, of_pairs)]
    for plan in made:
        assert any("computed apart" in each for each in plan.assumptions)
        assert not plan.lever(MicroBatches).tried
    model = Net()
    with made[0].apply(model) as applied:
        applied.backward(batch(256), of_samples)
    with made[1].apply(model) as applied, pytest.raises(LeverError, match="couples the samples"):
        applied.backward(batch(256), of_pairs)


def test_the_trial_changes_nothing():
    model = Net(nn.BatchNorm1d(16), dropout=0.5)
    whole = batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, kept = torch.get_rng_state(), [tensor.clone() for tensor in whole]

    def writes(model, batch):
        batch[0].mul_(2)
        return of_samples(model, batch)

    with pytest.raises(LeverError):
        refuse_coupled(model, whole, writes)
    assert torch.get_rng_state().equal(state)
    assert all(a.equal(b) for a, b in zip(whole, kept, strict=True))
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_micro_batches_of_the_callers_own_are_not_tried():
    plan = tightfit.plan(Net(), batch(256), "1x", loss=of_pairs, micro_batches=2)
    with plan.apply(model := Net()) as applied:
        applied.backward(batch(256), of_pairs)
    assert model.layers[0][0].weight.grad is not None


def test_the_shape_of_a_batch_can_be_tried():
    plan = tightfit.plan(decoder(), TokenBatch(4, 96, 600), "0.7x", levers=["micro_batch"])
    assert plan.lever(MicroBatches).tried
