"""Devices in the user's own figures, after a card's name or instead of it."""

import json
import re

import pytest
import torch

from command_line import mistake, tightfit
from round_device import round_device
from tightfit.devices.described import changed, host_named, read_description, with_host
from tightfit.devices.known import find, known_devices
from tightfit.devices.present import lookup, lookup_present
from tightfit.errors import DeviceError

pytestmark = pytest.mark.keeps("device-described-user-own")

OWN = "memory=8GiB,bandwidth=400GB/s,fp32=20TFLOPS,bf16=60TFLOPS,capability=8.6"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def card(name):
    found = find(name)
    assert found is not None
    assert found.spec.roofline is not None
    return found.spec


def test_figures_after_a_name_take_the_place_of_that_cards_own():
    spec, plain = lookup("RTX 3080, memory=8GiB, link=10GB/s"), card("rtx3080")
    assert spec.memory_bytes == 8 * 2**30
    assert spec.roofline.link_bytes_per_second == 10e9
    assert spec.roofline.flops_per_second == plain.roofline.flops_per_second
    assert (spec.kind, spec.compute_capability, spec.sm_count) == ("cuda", plain.compute_capability, plain.sm_count)
    assert "memory=8GiB" in spec.name


def test_a_device_of_ones_own_has_the_given_figures_and_else_those_of_the_card_most_like_it():
    spec = lookup(OWN)
    assert spec.memory_bytes == 8 * 2**30
    assert spec.compute_capability == (8, 6)
    assert spec.roofline.memory_bytes_per_second == 400e9
    assert spec.roofline.flops_per_second["float32"] == 20e12
    assert spec.roofline.flops_per_second["bfloat16"] == 60e12
    like = next(k.spec for k in known_devices().values() if spec.name.endswith(f"(else as {k.spec.name})"))
    scale = 20e12 / like.roofline.flops_per_second["float32"]
    assert spec.sm_count == round(like.sm_count * scale)
    assert spec.roofline.flops_per_second["float16"] == like.roofline.flops_per_second["float16"] * scale


def test_of_a_device_that_was_measured_only_the_memory_can_be_set():
    description = read_description("cpu,memory=1GiB")
    assert description is not None
    spec = changed(round_device(), description)
    assert spec.memory_bytes == 2**30
    assert spec.products == round_device().products
    rates = read_description("cpu,bandwidth=10GB/s")
    assert rates is not None
    with pytest.raises(DeviceError, match="only its memory can be set"):
        changed(round_device(), rates)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx3080,memry=8GiB", "'memry' is not known: did you mean memory?"),
        ("rtx3080,colour=red", "choose from memory, bandwidth"),
        ("memory=8GiB,fp32=20TFLOPS", "lacks bandwidth, capability: give them, for example bandwidth=400GB/s"),
        ("rtx3080,memory=8GHz", "memory is '8GHz', wanted bytes with their unit"),
        ("rtx3080,memory=8", "memory is '8', wanted bytes with their unit"),
        ("rtx3080,memory=-8GiB", "memory is '-8GiB'"),
        ("rtx3080,memory=0GiB", "memory is '0GiB'"),
        ("rtx3080,memory=8GiB,memory=9GiB", "memory is given twice"),
        ("rtx3080,bandwidth=400GB", "for example 400GB/s"),
        ("rtx3080,fp32=20", "for example 20TFLOPS"),
        ("rtx3080,capability=eight", "for example 8.6"),
        ("rtx3080,sms=0", "sms is '0'"),
        ("rtx3080,8GiB", "'8GiB' has no value"),
        ("rtx3080,", "'' has no value"),
        ("rtx9999,memory=8GiB", "'rtx9999' is not known"),
        (OWN.replace("8.6", "4.2"), "no card of compute capability 4"),
    ],
)
def test_what_cannot_be_read_is_one_line(text, said):
    with pytest.raises(DeviceError) as caught:
        lookup(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_described_device_that_is_not_here_runs_nothing():
    for text in ("rtx3080,memory=8GiB", OWN):
        with pytest.raises(DeviceError, match="is not in this machine"):
            lookup_present(text)


def test_the_command_line_and_yaml_take_the_same_text_and_json_has_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{preset: cpu8}}\ntraining: {{device: '{OWN}'}}\n")
    by_option = tightfit("estimate", path, "--device", OWN, "--json")
    by_key = tightfit("estimate", path, "--json")
    assert by_option.answer == by_key.answer
    told = json.loads(by_key.out)
    assert OWN in told["device"]
    assert told["device_bytes"] == 8 * 2**30
    assert "memory=8GiB" in tightfit("devices", "--help").out
    assert "memory is '8GHz'" in mistake("estimate", path, "--device", "rtx3080,memory=8GHz")


@pytest.mark.parametrize(
    ("text", "rate", "memory"),
    [
        ("desktop", 50e9, None),
        ("workstation", 0.558 * 8 * 8 * 4.8e9, None),
        ("server,memory=512GiB", 0.558 * 12 * 8 * 4.8e9, 512 << 30),
        ("memory=64GiB,bandwidth=80GB/s", 80e9, 64 << 30),
        ("memory=64GiB", 50e9, 64 << 30),
    ],
)
def test_a_host_has_a_rate_and_a_memory(text, rate, memory):
    spec = with_host(card("rtx4090"), text)
    assert spec.host_bytes_per_second == pytest.approx(rate, rel=0.001)
    assert host_named(text).memory_bytes == memory
    assert f"{rate / 1e9:.0f} GB/s" in spec.host_assumption


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("laptop", "'laptop' is not known: choose from desktop, workstation, server, or give figures"),
        ("desktop,link=16GB/s", "'link' is not known: choose from memory, bandwidth"),
        ("memory=64", "memory is '64', wanted for example 8GiB"),
        ("memory=1GiB,memory=2GiB", "memory is given twice"),
    ],
)
def test_a_host_that_is_wrong_is_one_line(text, wrong):
    with pytest.raises(DeviceError, match=re.escape(wrong)):
        with_host(card("rtx4090"), text)


@pytest.mark.slow  # a plan for each host
def test_a_faster_host_updates_faster_and_its_memory_is_the_budget():
    asked = ("--model", "cpu26", "--seq-len", "64", "--device", "rtx4090", "--optimizer", "offloaded_adamw", "--json")
    seconds = {}
    for host in ("desktop", "server"):
        done = tightfit("estimate", *asked, "--host", host)
        seconds[host] = json.loads(done.out)["step_seconds"]
        assert f"({host}: " in done.err
    assert seconds["server"] < seconds["desktop"]
    assert json.loads(tightfit("estimate", *asked).out)["step_seconds"] == pytest.approx(seconds["desktop"], rel=1e-3)
    for command in (("plan", "--budget", "20GiB"), ("fit",)):
        refused = tightfit(*command, *asked, "--host", "memory=1MiB")
        assert refused.code == 3
        assert "1.00 MiB of host memory cannot fit" in refused.err


def test_a_cpu_has_no_host():
    assert "is the host itself" in mistake("estimate", "--model", "cpu26", "--device", "cpu", "--host", "desktop")
