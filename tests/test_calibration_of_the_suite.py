"""No test hangs on how fast the machine is that runs it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from made_up_devices import CALIBRATIONS
from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec


def test_the_cpu_that_is_present_has_the_made_up_figures(present_cpu):
    assert lookup("cpu") == present_cpu


def test_with_other_threads_too(present_cpu):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert lookup("cpu") == present_cpu
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow  # an interpreter of its own
def test_in_a_process_that_a_test_starts_too(present_cpu):
    program = "import json; from tightfit.devices.present import lookup; print(json.dumps(lookup('cpu').to_dict()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert DeviceSpec.from_dict(json.loads(done.stdout)) == present_cpu


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_each_calibration_has_all_the_figures_of_a_cpu(name):
    spec, even = CALIBRATIONS[name](), CALIBRATIONS["even"]()
    assert DeviceSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert {*spec.products, *spec.attention, *spec.streams} == {*even.products, *even.attention, *even.streams}
    assert name == "even" or replace(spec, disturbed_by="") != even


def test_no_card_is_present_whatever_the_machine_has():
    assert torch.cuda.device_count() == 0
    assert lookup(None).kind == "cpu"
