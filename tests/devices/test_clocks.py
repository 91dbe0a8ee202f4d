"""The two clocks of a step: the host's launches and the device's kernels."""

import pytest

import tightfit
from made_up_devices import even
from tightfit.devices.clocks import Clocks, Seconds, clocks_of
from tiny import decoder, token_batch


def test_a_price_is_the_later_of_its_clocks_and_keeps_both():
    assert Seconds.of(host=2.0, device=3.0) == 3.0
    assert clocks_of(Seconds.of(host=2.0, device=3.0), of_host=0.5) == Clocks(2.5, 3.0)
    assert clocks_of(3.0, of_host=0.5) == Clocks(3.5, 3.5)  # a CPU's


@pytest.mark.keeps("estimates-plans-state-seconds")
def test_on_a_cpu_both_clocks_are_the_step():
    found = tightfit.estimate(decoder(num_layers=1), token_batch(1, 16), device=even()).to_dict()
    assert found["host_seconds"] == found["device_seconds"] == pytest.approx(found["step_seconds"])


@pytest.mark.keeps("estimates-plans-state-seconds")
@pytest.mark.parametrize(("width", "later"), [(32, "host_seconds"), (256, "device_seconds")])
def test_on_a_card_small_steps_wait_for_the_host_and_large_ones_for_the_device(width, later):
    batch = token_batch(1, 16) if width == 32 else token_batch(64, 512)
    found = tightfit.estimate(decoder(hidden_size=width, num_layers=1), batch, device="rtx4090").to_dict()
    clocks = found["host_seconds"], found["device_seconds"]
    assert found[later] == max(clocks)
    assert max(clocks) <= found["step_seconds"] <= sum(clocks)


@pytest.mark.keeps("estimates-plans-state-seconds")
def test_plans_state_both_clocks():
    plan = tightfit.plan(decoder(num_layers=1), token_batch(1, 16), "2x", device="rtx4090").to_dict()
    for clock in ("host_seconds", "device_seconds"):
        assert plan[clock] == plan["planned"][clock] == plan["plain"][clock] > 0
