"""Parameters that the optimizer does not drop the gradients of, and parameters that are none of the model's."""

import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device
from tightfit.memory.allocator import measured_peak
from tightfit.optim.by_name import state_tensors

WIDTH = 64
BATCH = {"x": torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))}
ROUNDING = 64  # bytes: numbers that Python wraps


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, kind=nn.ModuleList):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), kind([Block() for _ in range(4)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def plain_loss(model, batch):
    return model(batch["x"])


class Case:
    """A model, its loss, its optimizer, and the parameters that are in neither."""

    def __init__(self, model, known, loss=plain_loss):
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(known)
        self.all = [*model.parameters()]

    def step(self):
        self.loss(self.model, BATCH).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self):
        self.step()
        self.step()
        gradients = [p.grad for p in self.all if p.grad is not None]
        return measured_peak(self.step, [*self.all, *gradients, *state_tensors(self.optimizer), *BATCH.values()])

    def asked(self):
        return {"loss": self.loss, "optimizer": self.optimizer, "device": round_device()}


def in_a_plain_list():
    model = Model(list)
    case = Case(model, model.parameters())
    case.all += [p for block in model.blocks for p in block.parameters()]
    return case


def not_given_to_the_optimizer():
    model = Model()
    return Case(model, model.first.parameters())


def frozen_with_gradients_left():
    model = Model()
    plain_loss(model, BATCH).backward()
    model.blocks.requires_grad_(False)
    return Case(model, model.first.parameters())


def frozen_in_a_plain_list_with_gradients_left():
    model = Model(list)
    plain_loss(model, BATCH).backward()
    case = Case(model, model.parameters())
    case.all += [p.requires_grad_(False) for block in model.blocks for p in block.parameters()]
    return case


def of_the_loss():
    model, head = Model(), nn.Linear(WIDTH, 4 * WIDTH)
    case = Case(model, model.parameters(), lambda model, batch: model(batch["x"]) + head(batch["x"]).mean())
    case.all += head.parameters()
    return case


def of_the_loss_and_known():
    model, head = Model(), nn.Linear(WIDTH, 4 * WIDTH)
    known = [*model.parameters(), *head.parameters()]
    case = Case(model, known, lambda model, batch: model(batch["x"]) + head(batch["x"]).mean())
    case.all += head.parameters()
    return case


CASES = [
    in_a_plain_list,
    not_given_to_the_optimizer,
    frozen_with_gradients_left,
    frozen_in_a_plain_list_with_gradients_left,
    of_the_loss,
    of_the_loss_and_known,
]


@pytest.mark.sampled(3)
@pytest.mark.keeps("gradients-stay-steps-predicted")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_gradients_that_stay_over_steps_are_predicted(make):
    case = make()
    predicted = tightfit.estimate(case.model, BATCH, **case.asked()).peak_bytes
    assert abs(case.measured() - predicted) <= ROUNDING


@pytest.mark.keeps("gradients-stay-steps-predicted")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_an_estimate_leaves_every_gradient_as_it_was(make):
    case = make()
    before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in case.all]
    tightfit.estimate(case.model, BATCH, **case.asked())
    for parameter, (gradient, content) in zip(case.all, before, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, content)


def test_a_plan_with_gradients_that_stay_is_measured_as_planned():
    case = not_given_to_the_optimizer()
    plan = tightfit.plan(case.model, BATCH, "0.95x", **case.asked())
    with plan.apply(case.model):
        assert abs(case.measured() - plan.peak_bytes) <= ROUNDING
