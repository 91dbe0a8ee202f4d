import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import mistake, tightfit
from made_up_devices import even
from tightfit.devices import present as module
from tightfit.devices.known import known_devices
from tightfit.devices.spec import AttentionPoint, DeviceSpec

SPEC = DeviceSpec(
    name="Round CPU",
    kind="cpu",
    memory_bytes=8 * 2**30,
    torch_version="2.13.0",
    threads=2,
    products={"nt/float32": (2e-11, 0.0, 0.0, 0.0, 1e-6)},
    attention={"forward/full/float32": (AttentionPoint(1024, 64, 2e-9),)},
    streams={"arithmetic/float32": ((1e3, 1e-6), (1e9, 0.1))},
    fresh_threshold_bytes=32 * 2**20,
    fresh_seconds_per_byte=1e-9,
    framework_seconds=2e-6,
)


@pytest.fixture(autouse=True)
def calibrations(monkeypatch, tmp_path):
    """No GPU, a cache of our own, and a calibration that takes no time; how often it was asked for."""
    asked = []

    def calibrate(kind):
        asked.append(kind)
        return SPEC

    monkeypatch.setattr(module, "calibrate", calibrate)
    monkeypatch.setattr(module, "rough", lambda kind: replace(even(), scaled_from="the figures of another CPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "110")
    return asked


def test_devices_shows_what_is_here_and_every_card_of_the_list(calibrations):
    lines = tightfit("devices").out.splitlines()
    first = {line.split()[0]: line for line in lines if line.strip()}
    assert set(known_devices()) < set(first)
    assert "here, not measured yet" in first["cpu"]
    assert "23.64 GiB" in first["rtx4090"]
    assert calibrations == []


def test_devices_shows_the_rates_of_a_device_that_was_measured():
    tightfit("calibrate")
    (line,) = (line for line in tightfit("devices").out.splitlines() if line.startswith("cpu"))
    assert line.split()[:4] == ["cpu", "8.00", "GiB", "0.1"]
    assert "here, measured" in line


def test_devices_as_json_names_the_source_of_every_published_figure():
    rows = {row["device"]: row for row in json.loads(tightfit("devices", "--json").out)}
    assert rows["cpu"]["figures"] is None
    assert rows["h100"]["figures"]["flops_per_second"]["bfloat16"] == 989.5e12
    assert rows["h100"]["origin"] == "published"
    assert rows["h100"]["sources"]


def test_calibrate_measures_once_shows_the_figures_and_says_where_they_are(calibrations, tmp_path):
    out = tightfit("calibrate").out
    assert "Round CPU, 2 threads" in out
    assert "100" in next(line for line in out.splitlines() if line.startswith("a @ b.T"))
    assert f"Kept in {tmp_path / 'cache'}" in out.replace("\n  ", "")
    assert tightfit("calibrate").out == out
    assert calibrations == ["cpu"]
    tightfit("calibrate", "--force")
    assert calibrations == ["cpu", "cpu"]


def test_calibrate_as_json_has_the_figures_and_their_file():
    figures = json.loads(tightfit("calibrate", "--json").out)
    assert DeviceSpec.from_json(figures.pop("path")) == DeviceSpec.from_dict(figures) == SPEC


def test_a_calibration_on_a_busy_machine_is_said_so(monkeypatch):
    monkeypatch.setattr(module, "calibrate", lambda kind: replace(SPEC, disturbed_by="others were at work"))
    outcome = tightfit("calibrate")
    assert "the machine was busy (others were at work)" in outcome.err
    assert "while Round CPU was measured, others were at work" in outcome.out


def test_the_figures_of_a_cuda_calibration_are_shown(monkeypatch):
    cuda = replace(
        SPEC,
        kind="cuda",
        fresh_threshold_bytes=None,
        launch_seconds=6e-6,
        link_bytes_per_second={"to_device/pinned": 25e9},
        workspace_bytes={"cublas": 2**25},
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "present", lambda kind, notice, measured: cuda)
    monkeypatch.setattr(module, "cache_path", lambda kind: "cache.json")
    out = tightfit("calibrate").out
    for line in ("Launch of an operator: 6.0 µs.", "Link, to device, pinned: 25.0 GB/s.", "Workspace of cublas: 32.00"):
        assert line in out


def test_a_card_that_is_not_here_cannot_be_measured():
    outcome = tightfit("calibrate", "--device", "rtx4090")
    assert outcome.code == 2
    assert outcome.error == "--device 'rtx4090' cannot be measured: take cpu or cuda"
    assert "finds no CUDA device" in tightfit("calibrate", "--device", "cuda").error


@pytest.mark.keeps("card-present-estimated-planned")
def test_an_estimate_for_a_card_that_is_not_here(calibrations):
    model = ("--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64)
    figures = json.loads(tightfit("estimate", *model, "--device", "RTX 4090", "--json").out)
    assert figures["device"] == "RTX 4090"
    assert figures["device_bytes"] == int(23.64 * 2**30)
    assert calibrations == []
    assert "did you mean rtx4090?" in tightfit("estimate", *model, "--device", "rtx4091").error


def test_a_plan_for_a_share_of_a_card_that_is_not_here():
    model = ("--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64)
    plan = json.loads(tightfit("plan", *model, "--device", "t4", "--budget", "80%", "--json").out)
    assert plan["budget_bytes"] == int(0.8 * int(14.75 * 2**30))


@pytest.mark.keeps("card-present-estimated-planned")
def test_training_on_a_card_that_is_not_here_is_refused_before_anything_is_read(tmp_path):
    config = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
    assert "'rtx4090' is not in this machine" in mistake(
        "train", config, "training.device=rtx4090", f"output.folder={tmp_path / 'run'}"
    )


@pytest.mark.parametrize("width", [60, 80, 110])
def test_no_name_of_a_card_is_folded_however_narrow_the_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = tightfit("devices").out.splitlines()
    assert max(map(len, lines)) <= width
    assert set(known_devices()) <= {line.split()[0] for line in lines if line}
    assert ("Left out, as the terminal is narrow: tf32" in " ".join(lines)) is (width < 110)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "asked",
    [
        ("estimate",),
        ("plan", "--budget", "0.8x"),
        ("fit", "--budget", "64MiB", "--optimizer", "sgd", "--precision", "fp32", "--dtype", "fp32"),
        ("estimate", "--device", "cpu"),
    ],
    ids=" ".join,
)
def test_at_first_use_no_question_waits_for_a_calibration(calibrations, asked):
    command, *options = asked
    outcome = tightfit(command, "--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64, *options)
    assert outcome.code == 0
    assert outcome.err.count("predicted seconds are rough") == 1
    assert calibrations == []


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(
            ("plan", "--model", "cpu8", "--seq-len", 8, "--budget", "400MiB", "--maximise", "batch_size", "--html"),
            marks=pytest.mark.slow,  # many batches, and a curve
            id="plan",
        ),
        ("fit", "--model", "cpu8", "--seq-len", 8, "--optimizer", "sgd", "--dtype", "fp32", "--pick", 1, "--output"),
    ],
    ids=lambda asked: asked[0],
)
def test_a_question_that_is_planned_again_says_once_that_seconds_are_rough(tmp_path, asked):
    outcome = tightfit(*asked, tmp_path / "answer.yaml")
    assert (tmp_path / "answer.yaml").exists()
    assert outcome.err.count("predicted seconds are rough") == 1


@pytest.mark.slow  # searches recipes twice
def test_a_recipe_for_a_card_in_a_machine_is_planned_for_that_machine(tmp_path):
    asked = (
        *("fit", "--model", "cpu8", "--seq-len", 8, "--device", "rtx3060", "--host", "bandwidth=0.5GB/s", "--json"),
        *("--optimizer", "offloaded_adamw", "--dtype", "fp32", "--precision", "fp32"),
    )
    found, written = tightfit(*asked), tightfit(*asked, "--output", tmp_path / "run.yaml")
    seconds = [outcome.answer["recipes"][0]["step_seconds"] for outcome in (found, written)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)
    assert written.err.count("the host works in its memory") == 1


def test_a_question_about_a_card_of_the_list_says_nothing_about_this_cpu(calibrations, tmp_path):
    outcome = tightfit(
        "estimate", "--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64, "--device", "rtx3060"
    )
    assert outcome.code == 0
    assert "rough" not in outcome.err
    assert calibrations == []
    assert not (tmp_path / "cache").exists()
