"""Random numbers that forward reads, and that decide which modules run: an estimate is that of the worst outcome."""

import random

import numpy
import pytest
import torch
from torch import nn

import tightfit
from tightfit.tracing.outcomes import Generators, OpenNumbers, assumed
from tightfit.tracing.restore import Contents, generators_restored
from tiny import allocator_peak

pytestmark = pytest.mark.keeps("random-numbers-forward-reads")


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


OF_THIS_FILE, NUMPYS_OF_THIS_FILE = random.Random(1), numpy.random.default_rng(1)


class Decides(nn.Module):
    """Four times one of two layers, or none."""

    def __init__(self, decision):
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.ModuleList(Layer(32) for _ in range(4))
        self.large = nn.ModuleList(Layer(96) for _ in range(4))
        self.decision, self.own, self.numpys = decision, random.Random(0), numpy.random.default_rng(0)

    def forward(self, x):
        for pair in zip(self.small, self.large, strict=True):
            place = self.decision(self)
            x = x if place is None else pair[place](x)
        return x


def squares(model, batch):
    return (model(batch["x"]).square() + next(model.parameters()).sum()).mean()


DECISIONS = {
    "dropped by torch": lambda model: None if torch.rand(()).item() < 0.5 else 1,
    "dropped by a comparison": lambda model: None if torch.rand([]) < 0.1 else 1,
    "dropped for a high number": lambda model: None if torch.rand(()).item() > 0.5 else 1,
    "chosen by torch": lambda model: int(torch.randint(2, (1,))),
    "chosen by a coin": lambda model: int(torch.bernoulli(torch.tensor(0.5))),
    "large for low of Python": lambda model: int(random.random() < 0.3),
    "large for high of Python": lambda model: int(random.random() > 0.3),
    "chosen by Python": lambda model: random.choice([0, 1]),
    "large for low of numpy": lambda model: int(numpy.random.rand() < 0.3),
    "by a generator of its own": lambda model: int(model.own.random() < 0.3),
    "by numpy's of its own": lambda model: int(model.numpys.random() < 0.3),
    "by a generator of this file": lambda model: int(OF_THIS_FILE.random() < 0.3),
    "by numpy's of this file": lambda model: int(NUMPYS_OF_THIS_FILE.integers(10) < 3),
}
REST = [name for name in list(DECISIONS)[1:] if name != "chosen by Python"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",  # each takes two seconds: six outcomes of every candidate are traced
    [*list(DECISIONS)[:1], "chosen by Python", *(pytest.param(n, marks=pytest.mark.slow) for n in REST)],
)
def test_the_worst_outcome_is_the_estimate_and_a_plan_fits_it(name):
    model, batch = Decides(DECISIONS[name]), {"x": torch.randn(512, 16)}
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), model.own.getstate()
    found = tightfit.estimate(model, batch, loss=squares)
    plan = tightfit.plan(model, batch, "0.85x", loss=squares)
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), model.own.getstate()) == states[1:]
    always = Decides(lambda model: 1)
    assert found.peak_bytes == tightfit.estimate(always, batch, loss=squares).peak_bytes
    assert any("random numbers that decide what runs" in line for line in found.assumptions + plan.assumptions)
    assert plan.peak_bytes <= plan.budget_bytes < found.peak_bytes
    with plan.apply(always):  # the same names and shapes: the plan holds for the outcome that needs most
        assert allocator_peak(always, batch, loss=squares) <= plan.peak_bytes


class ChoosesLayers(nn.Module):
    """Four layers, one after another, each drawn from four."""

    def __init__(self, decision):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(64) for _ in range(4))
        self.decision = decision

    def forward(self, x):
        for place in range(4):
            x = self.layers[self.decision(place)](x)
        return x


@pytest.mark.slow  # many layers, several outcomes
@pytest.mark.parametrize(
    "decision",
    [
        lambda place: random.choice(range(4)),
        pytest.param(lambda place: int(torch.randint(4, ())), marks=pytest.mark.slow),  # each takes three seconds
        pytest.param(lambda place: int(numpy.random.randint(4)), marks=pytest.mark.slow),
    ],
    ids=["Python", "torch", "numpy"],
)
def test_choices_among_many_layers_are_all_different_in_the_worst_outcome(decision):
    model, batch = ChoosesLayers(decision), {"x": torch.randn(64, 16)}
    found = tightfit.estimate(model, batch, loss=squares).peak_bytes
    assert found == tightfit.estimate(ChoosesLayers(int), batch, loss=squares).peak_bytes
    plan = tightfit.plan(model, batch, "0.9x", loss=squares)
    for seed in range(6):
        random.seed(seed), torch.manual_seed(seed), numpy.random.seed(seed)
        assert allocator_peak(model, batch, loss=squares) <= found
        with plan.apply(model):
            assert allocator_peak(model, batch, loss=squares) <= plan.budget_bytes


@pytest.mark.parametrize(
    "kept",
    [
        lambda x, mask: x[mask],
        lambda x, mask: x[mask.nonzero()[:, 0]],
        lambda x, mask: x.masked_select(mask[:, None]).view(-1, 16),
    ],
    ids=["mask", "nonzero", "masked_select"],
)
def test_rows_that_are_kept_at_random_are_assumed_to_be_all(kept):
    def loss(model, batch):
        return model(kept(batch["x"], torch.rand(len(batch["x"])) < 0.5)).square().sum()

    def of_all(model, batch):
        return model(kept(batch["x"], torch.ones(len(batch["x"])) > 0.5)).square().sum()

    model, batch = Layer(64), {"x": torch.randn(256, 16)}
    found = tightfit.estimate(model, batch, loss=loss)
    assert any("random numbers that decide what runs" in line for line in found.assumptions)
    # `torch.ones` takes the memory of the draw.
    assert found.peak_bytes == tightfit.estimate(model, batch, loss=of_all).peak_bytes
    assert allocator_peak(model, batch, loss=loss) < found.peak_bytes


@pytest.mark.slow  # a plan and many real steps
def test_real_steps_stay_below_the_plan_and_one_of_them_reaches_the_estimate():
    model, batch = Decides(DECISIONS["large for low of Python"]), {"x": torch.randn(512, 16)}
    found = tightfit.estimate(model, batch, loss=squares).peak_bytes
    plan = tightfit.plan(model, batch, "0.85x", loss=squares)
    plain, planned = [], []
    for seed in range(12):
        random.seed(seed)
        plain.append(allocator_peak(model, batch, loss=squares))
        with plan.apply(model):
            random.seed(seed)
            planned.append(allocator_peak(model, batch, loss=squares))
    assert max(plain) <= found
    assert max(planned) <= plan.peak_bytes


def test_a_model_that_draws_and_decides_nothing_has_one_outcome():
    class Noisy(Decides):
        def forward(self, x):
            return super().forward(x * self.number())

    batch = {"x": torch.randn(512, 16)}
    model, like = Noisy(lambda model: 0), Noisy(lambda model: 0)
    model.number, like.number = lambda: torch.rand(()).item(), lambda: 0.5
    found = tightfit.estimate(model, batch, loss=squares)
    assert found.peak_bytes == tightfit.estimate(like, batch, loss=squares).peak_bytes
    assert not any("random numbers" in line for line in found.assumptions)


@pytest.mark.parametrize("draws", list(OpenNumbers)[:4])
def test_generators_draw_near_the_ends_and_at_random_later(draws):
    def three():
        found = [random.random(), float(numpy.random.rand()), torch.rand(()).item()]
        return found, [torch.randn(20), random.normalvariate(0, 1), numpy.random.randn()]

    with generators_restored(), assumed(draws):
        Generators(Contents([])).begin()
        first = random.random(), numpy.random.rand(), torch.rand(()).item()
        second = random.random(), numpy.random.rand(), torch.rand(()).item()
        high = [all(number > 0.99 for number in numbers) for numbers in (first, second)]
        low = [all(number < 0.01 for number in numbers) for numbers in (first, second)]
        assert [a or b for a, b in zip(high, low, strict=True)] == [True, True]
        wanted = {
            OpenNumbers.HIGH: [True, True],
            OpenNumbers.LOW: [False, False],
            OpenNumbers.HIGH_THEN_LOW: [True, False],
        }
        assert high == wanted.get(draws, [False, True])
        for _ in range(700):
            three()
        numbers = [three()[0] for _ in range(50)]
        assert all(0.2 < sum(row[place] for row in numbers) / 50 < 0.8 for place in range(3))
