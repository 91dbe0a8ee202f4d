"""Numbers that forward computes and reads, and that decide what runs: an estimate is that of the worst answer."""

import pytest
import torch
from torch import nn

import tightfit
from round_device import round_device
from tiny import allocator_peak

pytestmark = pytest.mark.keeps("computed-numbers-forward-reads")


def layer():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


class Decides(nn.Module):
    """Six layers and what runs of them; the answer on real numbers is the one that a dry run does not assume first."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.halt = nn.ModuleList(layer() for _ in range(6)), nn.Linear(64, 1)
        self.way = way

    def forward(self, x):
        return self.way(self, x)

    def all(self, x):
        for each in self.layers:
            x = x + each(x)
        return x


def while_some_go_on(model, x):  # adaptive depth, with a largest one
    for each in model.layers:
        if not (model.halt(x) < 1e9).any():
            break
        x = x + each(x)
    return x


def unless_all_are_certain(model, x):
    for each in model.layers:
        x = x + each(x)
        if (model.halt(x) > 1e9).all():
            break
    return x


def for_a_low_number(model, x):
    return model.all(x) if model.halt(x).square().mean().item() * 0 < 0.5 else x + model.halt(x)


def for_a_high_number(model, x):
    return model.all(x) if model.halt(x).square().mean().item() * 0 + 1 > 0.5 else x + model.halt(x)


def for_a_count(model, x):
    return model.all(x) if int((model.halt(x) > -1e9).sum()) > 0 else x + model.halt(x)


def for_different_ones(model, x):
    return x + model.halt(x) if torch.equal(x, x + model.halt(x) * 0) and x.isnan().any() else model.all(x)


def behind_a_check(model, x):
    assert ((model.halt(x) + 1e9) > 0).all(), "no answer but True goes on"
    return model.all(x) if (model.halt(x) > -1e9).any() else x + model.halt(x)


def behind_a_division(model, x):
    x = x / (model.halt(x).square().mean().item() + 1)
    if model.halt(x).square().mean().item() == 0:
        raise ZeroDivisionError("an answer that raises is none")
    return model.all(x) if (model.halt(x) > -1e9).any() else x + model.halt(x)


WAYS = [while_some_go_on, unless_all_are_certain, for_a_low_number, for_a_high_number, for_a_count]
WAYS += [for_different_ones, behind_a_check, behind_a_division]


def squares(model, batch):
    return model(batch["x"]).square().mean()


def wanted(way, micro_batches=1):
    return {"loss": squares, "optimizer": "sgd", "device": round_device(), "micro_batches": micro_batches}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_worst_answer_is_the_estimate_and_a_plan_fits_it(way):
    model, batch = Decides(way), {"x": torch.randn(512, 64)}
    found = tightfit.estimate(model, batch, **wanted(way))
    assert found.peak_bytes == allocator_peak(Decides(way), batch, loss=squares, optimizer="sgd")
    plan = tightfit.plan(model, batch, "0.8x", **wanted(way))
    with plan.apply(model):
        assert allocator_peak(model, batch, loss=squares, optimizer="sgd") == plan.peak_bytes <= plan.budget_bytes
    for told in (found.assumptions, plan.assumptions):
        # With other answers nothing else runs, or with the usual ones nothing that is trained.
        is_alone = way in (for_a_high_number, for_a_low_number, for_different_ones, while_some_go_on)
        assert any("numbers that decide what runs" in line for line in told) or is_alone, told


def test_a_check_of_finite_numbers_has_one_answer():
    def checked(model, x):
        if torch.isnan(x).any() or torch.isinf(model.halt(x)).any() or not torch.isfinite(model.halt(x)).all():
            x = torch.nan_to_num(x)
        y = model.halt(x)
        if torch.isnan(y).sum() > 0 or (y != y).any().item():
            x = x.clamp(-1, 1)
        assert not torch.logical_or(y.isnan(), y == float("inf")).any().float()
        return model.all(x)

    model, batch = Decides(checked), {"x": torch.randn(512, 64)}
    found = tightfit.estimate(model, batch, **wanted(checked))
    assert found.peak_bytes == allocator_peak(model, batch, loss=squares, optimizer="sgd")
    assert any("whether numbers are finite" in line for line in found.assumptions)


def test_a_flag_that_is_written_is_no_longer_that_of_finite_numbers():
    def flagged(model, x):
        flag = torch.isnan(model.halt(x)).any()
        flag.logical_or_(model.halt(x).mean() < 1e9)
        return model.all(x) if flag else x + model.halt(x)

    model, batch = Decides(flagged), {"x": torch.randn(512, 64)}
    found = tightfit.estimate(model, batch, **wanted(flagged))
    assert found.peak_bytes == allocator_peak(model, batch, loss=squares, optimizer="sgd")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loop_without_a_largest_count_runs_once_and_is_told(micro_batches):
    def loop(model, x):
        halted = (x * 0).sum(1, keepdim=True)
        halted = halted + model.halt(x).detach() * 0
        while (halted < 0.9).any():
            x, halted = x + model.layers[0](x), halted + 1
        return x + model.halt(x)

    def once(model, x):
        x = x + model.layers[0](x)
        return x + model.halt(x)

    batch = {"x": torch.randn(512, 64)}
    found = tightfit.estimate(Decides(loop), batch, **wanted(loop, micro_batches))
    plain = tightfit.estimate(Decides(once), batch, **wanted(once, micro_batches))
    assert found.peak_bytes == pytest.approx(plain.peak_bytes, rel=0.03)  # who has halted takes some bytes
    assert any("a loop that ends by a number" in line and "each further round" in line for line in found.assumptions)


def test_code_that_is_traced_has_the_peak_of_the_worst_answer():
    x = torch.randn(512, 64)
    ways = (while_some_go_on, unless_all_are_certain, for_a_low_number, for_a_count, behind_a_check)
    for way in ways:
        model = Decides(way)
        found = tightfit.trace(lambda model: model(x).square().mean().backward(), model, device=round_device())
        plain = Decides(lambda model, x: model.all(x))
        wanted = tightfit.trace(lambda model: model(x).square().mean().backward(), plain, device=round_device())
        assert wanted.peak_bytes <= found.peak_bytes <= 1.01 * wanted.peak_bytes, way.__name__  # it asks beside
        is_told = any("numbers that decide what runs" in line for line in found.assumptions)
        # The usual answers of the others run all, or raise, since nothing that is trained runs.
        assert is_told == (way in (for_a_count, behind_a_check)), way.__name__


def test_code_that_raises_for_other_answers_has_the_usual_ones():
    def divides(model, x):
        if model(x).sum() > 1e9:
            raise OverflowError
        return model(x).mean() * 1

    model, x = layer(), torch.randn(512, 64)
    found = tightfit.trace(divides, model, x, device=round_device())
    assert not any("decide what runs" in line for line in found.assumptions)


def test_other_answers_with_which_no_step_goes_on_are_told():
    checks = [eval(f"lambda y: bool((y > 1e9 + {number}).any())") for number in range(9)]  # more than are answered

    def checked(model, x):
        if any(check(model.halt(x)) for check in checks):
            raise OverflowError
        return model.all(x)

    model, batch = Decides(checked), {"x": torch.randn(512, 64)}
    found = tightfit.estimate(model, batch, **wanted(checked))
    traced = tightfit.trace(lambda model: squares(model, batch).backward(), model, device=round_device())
    assert found.peak_bytes == allocator_peak(model, batch, loss=squares, optimizer="sgd")
    for told in (found.assumptions, traced.assumptions):
        assert any("with other answers to what it reads the step raises OverflowError" in line for line in told), told


class Stage(nn.Module):
    """A block of layers that goes on as long as numbers are small."""

    def __init__(self, limit):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.register_buffer("limit", torch.tensor(limit))

    def forward(self, x):
        for layer in self.layers:
            if x.detach().mean() > self.limit:
                break
            x = x + torch.tanh(torch.tanh(layer(x)))
        return x


def test_a_first_step_that_ends_early_leaves_the_choices_of_later_ones():
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(64, 64), *map(Stage, [1e9] * 3)), {"input": torch.randn(256, 64)}

    def loss(model, batch):
        return model(**batch).square().mean()

    made = tightfit.plan(model, batch, "0.7x", loss=loss, optimizer="sgd", levers=["recompute"])
    assert any(choice.kept for choice in made.choices)
    with made.apply(model):
        for stage in model[1:]:
            stage.limit.fill_(-1e9)
        assert allocator_peak(model, batch, loss=loss, optimizer="sgd") < made.peak_bytes
        for stage in model[1:]:
            stage.limit.fill_(1e9)
        assert allocator_peak(model, batch, loss=loss, optimizer="sgd") <= made.budget_bytes
