import json
import math
from pathlib import Path

import pytest
import torch

from tightfit.devices.known import find, kernels_of, known_devices, nearest
from tightfit.devices.present import lookup, lookup_present
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import DeviceError

WANTED = (
    "H200", "H100", "A100-40", "A100-80", "L40S", "L4", "A10", "T4", "V100-16", "V100-32", "RTX 5090", "RTX 4090",
    "RTX 4080", "RTX 4070 Ti Super", "RTX 4060 Ti 16GB", "RTX 3090", "RTX 3080", "RTX 3060 12GB", "RTX 2080 Ti",
    "A100", "B200", "GH200", "A40", "A10G", "RTX A6000", "RTX 6000 Ada", "P100", "RTX 5080", "RTX 5070 Ti", "RTX 5070",
    "RTX 5060 Ti", "RTX 4070", "RTX 4070 Super", "RTX 4070 Ti", "RTX 4060", "RTX 4060 Ti", "RTX 3070", "RTX 3060 Ti",
    "GTX 1080 Ti", "RTX 5090 Laptop", "RTX 4090M", "RTX 4060 Laptop GPU", "RTX 3080 Laptop", "RTX 3060 Mobile",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", WANTED)
def test_the_common_cards_are_known(name):
    assert find(name) is not None


@pytest.mark.keeps("card-found-however-name")
@pytest.mark.parametrize("name", ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090", "rtx-4090", "GeForce 4090"])
def test_a_card_is_found_however_it_is_written(name):
    assert lookup(name).name == "RTX 4090"


@pytest.mark.parametrize(
    ("reported", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "rtx4070-laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("Tesla P100-PCIE-16GB", "p100"),
    ],
)
def test_a_card_is_found_by_the_name_that_cuda_reports(reported, key):
    found = find(reported)
    assert found is not None
    assert found.key == key


def test_no_two_cards_answer_to_one_name():
    for key, device in known_devices().items():
        for name in (key, device.spec.name, *device.aliases):
            assert find(name) == device


@pytest.mark.keeps("card-found-however-name")
@pytest.mark.parametrize("device", known_devices().values(), ids=known_devices())
def test_every_figure_of_a_card_is_plausible_and_has_a_source(device):
    spec, roofline = device.spec, device.spec.roofline
    assert roofline is not None
    assert DeviceSpec.from_dict(spec.to_dict()) == spec
    rates = roofline.flops_per_second
    # A core does two operations a clock. Cards of Pascal for games (6.1) have no fast fp16.
    lanes = spec.sm_count * 2 * (64 if spec.compute_capability in ((6, 0), (7, 0), (7, 5), (8, 0)) else 128)
    assert 0.95e9 < rates["float32"] / lanes < 2.7e9
    assert rates.get("float16", 2 * rates["float32"]) >= 1.9 * rates["float32"]
    assert ("float16" in rates) == (spec.compute_capability != (6, 1))
    assert ("bfloat16" in rates) == ("tf32" in rates) == (spec.compute_capability >= (8, 0))
    assert rates.get("bfloat16") in (None, rates.get("float16"))
    # What PyTorch sees is a little less than a whole number of GB (of 2**30 bytes) on the box.
    size = spec.memory_bytes / 2**30
    assert math.ceil(size) - size < 1 or size > 24
    assert 1e11 < roofline.link_bytes_per_second * 20 < roofline.memory_bytes_per_second * 20
    kernels = roofline.kernels
    assert all(0 < share <= 1 for share in kernels.shares.values())
    assert 1e-6 < kernels.kernel_seconds < kernels.launch_seconds < 1e-4
    assert all(source.startswith("https://") for source in device.sources)
    assert device.memory_source
    assert device.kernels_source


@pytest.mark.keeps("name-several-cards-share")
@pytest.mark.parametrize(("name", "key"), [("a100", "a100-80"), ("V100", "v100-16"), ("RTX 4060 Ti", "rtx4060ti-8")])
def test_a_name_that_several_cards_share_is_the_most_usual_one_and_it_is_said(name, key):
    lines = []
    taken = known_devices()[key].spec
    assert lookup(name, lines.append) is taken
    assert lookup(f"{name},bandwidth=400GB/s", lines.append).memory_bytes == taken.memory_bytes
    for line in lines:
        assert f"device {name!r} is taken as {taken.name} ({key}); its other variants: " in line
        assert set(line.partition("variants: ")[2].split(", ")) < set(known_devices()) - {key}
    assert len(lines) == 2
    lookup(key, lines.append)
    assert len(lines) == 2


@pytest.mark.keeps("card-found-however-name")
def test_an_unknown_card_is_answered_with_the_nearest():
    with pytest.raises(DeviceError, match=r"device 'rtx4091' is not known: did you mean rtx4090\?"):
        lookup("rtx4091")
    assert nearest("a100")[:2] == ["a100-80", "a100-40"]
    assert nearest("v100")[:2] == ["v100-32", "v100-16"]
    assert nearest("rtx309")[:2] == ["rtx3090", "rtx3090ti"]


def test_a_card_that_is_not_here_runs_nothing():
    with pytest.raises(DeviceError, match="'rtx4090' is not in this machine"):
        lookup_present("rtx4090")


def test_the_card_that_is_here_has_its_measured_figures(monkeypatch, spec):
    from tightfit.devices import present as module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_name", lambda kind: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(module, "present", lambda kind, notice, measured: spec)
    assert lookup("rtx4090") is spec
    assert lookup_present("rtx4090") is spec
    assert lookup("rtx3090").name == "RTX 3090"


def test_a_spec_is_a_device_too(spec):
    assert lookup(spec) is spec


def test_what_the_host_takes_beside_a_launch_is_what_a_null_card_showed():
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "launches.json"
    shares = json.loads(path.read_text(encoding="utf-8"))["launches"]
    spec = lookup("rtx4090")
    assert spec.host_seconds == kernels_of("tensor_cores").launch_seconds
    assert spec.recording_seconds == shares["recording"] * spec.host_seconds
    assert spec.replaying_seconds == shares["replaying"] * spec.host_seconds
    assert spec.captured_seconds == shares["captured"] * spec.host_seconds
