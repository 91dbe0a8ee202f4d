from dataclasses import replace

import pytest
import torch

from made_up_devices import even
from tightfit.devices import in_steps as module
from tightfit.devices.cost import MeasuredLaw
from tightfit.devices.in_steps import in_steps
from tightfit.devices.spec import DeviceSpec
from tightfit.devices.work import work_of


class Shape:
    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.stride = shape, dtype, (shape[1], 1)


def priced_and(monkeypatch, spec, measured):
    """The prices of both steps, with `measured(prices by precision)` in the place of the clock."""
    law, seen = MeasuredLaw(spec), []

    def seconds(training, half):
        training.step(half)  # the first one makes the optimizer's states
        prices = training.priced(law, half)
        seen.append(prices)
        return measured(prices)

    monkeypatch.setattr(module._Training, "seconds", seconds)
    return seen


def test_a_step_that_takes_its_price_and_more_gives_the_shares_of_both_precisions(monkeypatch):
    spec = even()
    shares = {"float32": 1.25, "half": 1.5}
    seen = priced_and(monkeypatch, spec, lambda prices: sum(shares[key] * spent for key, spent in prices.items()))
    assert in_steps(spec) == pytest.approx(shares)
    full, half = seen
    assert set(full) == {"float32"}
    assert set(half) == {"float32", "half"}  # the loss and the optimizer stay in fp32 under autocast


def test_a_busy_machine_cannot_move_prices_without_limit(monkeypatch):
    priced_and(monkeypatch, even(), lambda prices: 100 * sum(prices.values()))
    assert set(in_steps(even()).values()) == {module.MOST}


def test_the_users_generator_and_mode_stay(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(module, "BATCH", (1, 32))
    state = torch.get_rng_state()
    with torch.no_grad():
        found = in_steps(even())
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(1 / module.MOST <= share <= module.MOST for share in found.values())


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1.25), (torch.bfloat16, 1.5)])
def test_prices_of_operators_are_those_within_steps(dtype, share):
    tensor = Shape((512, 512), dtype)
    work = work_of("aten.mul.Tensor", [tensor, tensor], [tensor])
    alone = MeasuredLaw(even()).seconds(work)
    within = MeasuredLaw(replace(even(), in_steps={"float32": 1.25, "half": 1.5})).seconds(work)
    assert within == pytest.approx(share * alone)


def test_figures_that_were_written_before_count_operators_as_they_are():
    written = even().to_dict()
    del written["in_steps"]
    assert DeviceSpec.from_dict(written).in_steps == {}
