from dataclasses import replace

import pytest
import torch

from made_up_devices import even
from tightfit.devices import in_steps as module
from tightfit.devices.cost import MeasuredLaw
from tightfit.devices.in_steps import StepTimes
from tightfit.devices.spec import DeviceSpec
from tightfit.devices.work import work_of


class Shape:
    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.stride = shape, dtype, (shape[1], 1)


@pytest.fixture
def steps(monkeypatch):
    """Two small steps of each precision."""
    monkeypatch.setattr(module, "BATCH", (1, 32))
    made = StepTimes()
    made.sample()
    return made


def test_a_step_that_takes_its_price_and_more_gives_the_shares_of_both_precisions(steps):
    spec, shares = even(), {"float32": 1.25, "half": 1.5}
    priced = {half: steps.priced(MeasuredLaw(spec), half) for half in (False, True)}
    assert set(priced[False]) == {"float32"}
    assert set(priced[True]) == {"float32", "half"}  # the loss and the optimizer stay in fp32 under autocast
    for half, prices in priced.items():
        took = sum(shares[key] * spent for key, spent in prices.items())
        steps.seconds[half] = [100 * took, took, 0.5 * took, took, took]
    assert steps.shares(spec) == pytest.approx(shares)


def test_a_busy_machine_cannot_move_prices_without_limit(steps):
    steps.seconds = {False: [1e6], True: [1e12]}
    assert set(steps.shares(even()).values()) == {module.MOST}


def test_steps_are_timed_each_time(steps):
    before = {half: list(seconds) for half, seconds in steps.seconds.items()}
    steps.sample()
    for half, seconds in steps.seconds.items():
        assert seconds[: module.SAMPLES] == before[half]
        assert len(seconds) == 2 * module.SAMPLES
        assert min(seconds) > 0


def test_the_users_generator_and_mode_stay(monkeypatch):
    monkeypatch.setattr(module, "BATCH", (1, 32))
    state = torch.get_rng_state()
    with torch.no_grad():
        made = StepTimes()
        made.sample()
        found = made.shares(even())
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
