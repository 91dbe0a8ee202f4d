"""Checks of numbers that raise: a dry run answers the question behind one so that the step goes on."""

import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device
from tightfit.errors import TraceError
from tightfit.planner.apply import apply_plan
from tiny import Stack, allocator_peak

pytestmark = pytest.mark.keeps("yes-question-whose-answer")


def finite(y):
    assert torch.isfinite(y).all(), "not finite"
    return y


def kept_for_later(y):
    is_good = bool((y.exp() >= 0).all())
    if not is_good:
        raise ValueError("negative")
    return y


def two_in_one_line(y):
    assert torch.isfinite(y).all() and not torch.isnan(y).any()  # noqa: PT018
    return y


def each_of_several(y):
    for row in y[:3]:
        if not (row * row >= 0).all():
            raise ValueError("a box is inside out")
    return y


def close(y):
    torch.testing.assert_close(y.detach(), y.detach() * 1.0)
    assert torch.allclose(y, y + 0)
    assert torch.equal(y, y.clone())
    return y


def as_numbers(y):
    assert torch.isfinite(y[0]).numpy().all()
    assert all((y[0] < 1e9).tolist())
    return y


def normal(y):
    return torch.distributions.Normal(y, 1.0, validate_args=True).rsample()  # dynamo turns it off in a process


def categorical(y):
    return torch.distributions.Categorical(logits=y.float(), validate_args=True).entropy()


def gamma(y):
    return torch.distributions.Gamma(y.exp(), 1.0, validate_args=True).rsample()


def dirichlet(y):
    return torch.distributions.Dirichlet(y.exp(), validate_args=True).rsample()


def beta(y):
    return torch.distributions.Beta(y.exp(), y.abs() + 1, validate_args=True).rsample()


def binomial(y):
    chances = torch.distributions.Binomial(3, logits=y.detach(), validate_args=True)
    return y * chances.sample()


CHECKS = [finite, kept_for_later, two_in_one_line, each_of_several, close, as_numbers, normal, categorical]
CHECKS += [gamma, dirichlet, beta, binomial]


def stack():
    torch.manual_seed(0)
    return Stack(*(nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(4)))


def loss_with(check):
    return lambda model, batch: check(model(batch["x"])).square().mean()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_passes_and_the_step_has_its_measured_peak(check):
    batch, loss = {"x": torch.randn(512, 64)}, loss_with(check)
    found = tightfit.estimate(stack(), batch, loss=loss, optimizer="sgd", device=round_device())
    assert found.peak_bytes == allocator_peak(stack(), batch, loss=loss, optimizer="sgd")
    assert any("assumed True" in str(told) for told in found.assumptions)


def test_a_plan_asks_once_and_is_bit_equal():
    runs = []

    def loss(model, batch):
        runs.append(0)
        return loss_with(normal)(model, batch)

    batch = {"x": torch.randn(512, 64)}
    model = stack()
    plan = tightfit.plan(model, batch, "0.7x", loss=loss, levers=["recompute"], device=round_device(), optimizer="sgd")
    with apply_plan(plan, model):
        assert allocator_peak(model, batch, loss=loss, optimizer="sgd") == plan.peak_bytes
    assert str(tightfit.verify(stack(), batch, plan, loss=loss)).startswith("bit-equal")


def test_the_answers_of_a_model_are_looked_for_once():
    runs = []

    def loss(model, batch):
        runs.append(0)
        return loss_with(kept_for_later)(model, batch)

    model, batch = stack(), {"x": torch.randn(512, 64)}
    for _ in range(2):
        tightfit.estimate(model, batch, loss=loss, optimizer="sgd", device=round_device())
        runs.append(1)
    first = runs.index(1)
    assert len(runs[first + 1 : -1]) == first - 1


def test_a_check_inside_of_a_block_that_is_recomputed_passes():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64))

        def forward(self, x):
            return finite(self.inner(x))

    def model():
        torch.manual_seed(0)
        return Stack(*(Checked() for _ in range(4)))

    batch, loss = {"x": torch.randn(512, 64)}, loss_with(lambda y: y)
    plan = tightfit.plan(model(), batch, "0.7x", loss=loss, levers=["recompute"], device=round_device())
    assert str(tightfit.verify(model(), batch, plan, loss=loss)).startswith("bit-equal")


@pytest.mark.parametrize("asks", [False, True])
def test_an_exception_that_no_answer_prevents_is_the_users_own(asks):
    def loss(model, batch):
        y = model(batch["x"])
        if asks and torch.isnan(y).any():
            y = y + 1
        raise LookupError("mine")

    model = stack()
    with pytest.raises(LookupError, match="mine"):
        tightfit.estimate(model, {"x": torch.randn(8, 64)}, loss=loss, device=round_device())
    assert all(p.grad is None for p in model.parameters())


def test_a_function_that_is_traced_is_run_again():
    model, x = stack(), torch.randn(512, 64)
    found = tightfit.trace(lambda: finite(model(x)).square().mean().backward(), device=round_device())
    plain = tightfit.trace(lambda: model(x).square().mean().backward(), device=round_device())
    assert found.peak_bytes == plain.peak_bytes


def until_all_are_done(y):
    done, x = torch.zeros(len(y), dtype=torch.bool), y
    while not done.all():  # as rejection sampling does
        accepted = x.mean(1) < 1e9
        if accepted.any():
            x, done = x * 0.5, done | accepted
    return x


def until_it_is_near(y):
    error = y.detach().norm()
    while True:
        try:
            if error.item() <= 1e-3:
                return y
        except Exception:
            continue
        y, error = y * 0.5, error * 0


def until_enough(y):
    count = 0
    while count < 3:
        count += int((y > -1e9).sum())
    return y


@pytest.mark.parametrize("loop", [until_all_are_done, until_it_is_near, until_enough], ids=lambda loop: loop.__name__)
def test_a_loop_that_waits_for_a_number_ends_and_is_told(loop):
    batch, loss = {"x": torch.randn(512, 64)}, loss_with(loop)
    found = tightfit.estimate(stack(), batch, loss=loss, optimizer="sgd", device=round_device())
    measured = allocator_peak(stack(), batch, loss=loss, optimizer="sgd")
    assert found.peak_bytes == pytest.approx(measured, abs=64)  # Python wraps numbers
    assert any("read from a tensor" in told for told in found.assumptions)


def test_a_loop_that_no_answer_ends_is_one_line(monkeypatch):
    monkeypatch.setattr("tightfit.tracing.questions.LONGEST", 2000)

    def loss(model, batch):
        while not any(1.5 < number.item() < 2 for number in model(batch["x"]).mean(0)[:1].unbind()):
            pass

    with pytest.raises(TraceError, match=r"test_checks.py:\d+: a loop that ends by a number cannot be run dry"):
        tightfit.estimate(nn.Linear(8, 8), {"x": torch.randn(4, 8)}, loss=loss, optimizer="sgd", device=round_device())


def test_a_long_loop_of_checks_is_run_to_its_end():
    def loss(model, batch):
        rows = [row for row in model(batch["x"]).flatten()[:600] if not row.isnan()]
        return torch.stack(rows).square().mean()

    batch = {"x": torch.randn(32, 64)}
    found = tightfit.estimate(nn.Linear(64, 64), batch, loss=loss, optimizer="sgd", device=round_device())
    assert found.peak_bytes == allocator_peak(nn.Linear(64, 64), batch, loss=loss, optimizer="sgd")


class Asking(nn.Module):
    """Layers that ask once a call each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x.clamp(-1, 1) if (layer(x) > 9).any() else layer(x)
        return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asking", ["layers", "an optimizer in backward"])
def test_what_asks_for_each_layer_or_weight_of_a_large_model_is_no_loop(asking):
    """It was taken for a loop without an end: `fit` of an 8B traced its step with Adafactor five times more."""
    asks = asking == "layers"
    layers = [Asking() if asks else nn.Linear(8, 8) for _ in range(300)]
    runs = []

    def loss(model, batch):
        runs.append(len(runs))
        return model(batch["x"]).square().mean()

    how = {} if asks else {"optimizer": "adafactor", "step_in_backward": True}
    found = tightfit.estimate(Stack(*layers), {"x": torch.randn(4, 8)}, loss=loss, device="rtx4090", **how)
    # A step that asks runs with the other answers too, one that steps in backward for its states; again if it imports.
    assert len(runs) <= 4
    assert not any("loop" in told for told in found.assumptions)


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_an_optimizer_reads_is_told_with_its_own_line(in_backward):
    how = {"optimizer": "adafactor", "step_in_backward": in_backward, "device": round_device()}
    found = tightfit.estimate(nn.Linear(8, 8), {"x": torch.randn(4, 8)}, loss=loss_with(finite), **how)
    told = [line for line in found.assumptions if "the optimizer read" in line]
    assert told
    assert all("_adafactor.py:" in line for line in told)


COUNTS = {
    "unique": lambda out: torch.unique((out > 0).sum(-1)).numel() * out.mean(),
    "unique_dim": lambda out: torch.unique(out.detach().round(), dim=0, return_inverse=True)[1].sum() * out.mean(),
    "unique_consecutive": lambda out: torch.unique_consecutive((out > 0).long().flatten()).sum() * out.mean(),
    "nonzero": lambda out: out[(out > 0).nonzero(as_tuple=True)].sum(),
    "masked_select": lambda out: out.masked_select(out > 0).sum(),
    "repeat_interleave": lambda out: out.repeat_interleave((out > 0).sum(-1), dim=0).sum(),
    "bincount": lambda out: torch.bincount((out > 0).sum(-1)).sum() * out.mean(),
    "histogram": lambda out: torch.histogram(out.detach(), 5).hist.sum() * out.mean(),
}


@pytest.mark.parametrize("name", COUNTS)
def test_results_that_are_as_many_as_numbers_say_are_assumed_and_told(name):
    model, batch = nn.Linear(8, 64), (torch.randn(32, 8),)
    found = tightfit.estimate(model, batch, loss=lambda model, batch: COUNTS[name](model(*batch)))
    text = " ".join(found.assumptions).replace("_unique2", "unique")
    assert (f"the number of results of aten.{name}." in text) == (name != "histogram"), text
