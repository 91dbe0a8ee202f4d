"""The benchmarks of single levers run at small size, and their figures are what they say."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quick_trainings import leave_out_pictures

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)

    def figures(name, *arguments):
        path = tmp_path / "results" / f"{name}.json"
        importlib.import_module(name).main(["--small", "--rounds", "1", "--output", str(path), *arguments])
        found = json.loads(path.read_text())
        assert json.loads(capsys.readouterr().out) == found
        assert found["environment"]["versions"]["torch"]
        return found

    return figures


def test_the_chunked_loss_head_takes_a_fraction_of_the_memory_and_is_as_exact(run):
    found = run("loss_head")
    sides = found["sides"]
    assert found["extra_of_plain"] < 0.1
    assert sides["chunked"]["gradient_error"] <= 2 * sides["plain"]["gradient_error"]


@pytest.mark.slow  # a dry run of each of seven losses
def test_the_distillation_loss_is_compared_with_two_logit_tensors_and_peers_that_are_absent_are_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(importlib.import_module("distillation_loss"), "SMALL", (8_192, 64, 128, 256))
    found = run("distillation_loss")
    assert found["left_out"] == [f"JSD, TRL on {what}: trl is not installed" for what in ("logits", "heads")]
    check_distillation(found, among=6)


def test_the_committed_figures_of_the_distillation_loss_are_those_of_its_promise():
    found = json.loads((BENCHMARKS / "results" / "distillation_loss.json").read_text())
    assert found["peers"].keys() == {"trl"}
    check_distillation(found, among=8)


def check_distillation(found, among):
    sides = found["sides"]
    assert len(sides) == among
    for name, side in sides.items():
        assert abs(side["extra_bytes"] - side["predicted_extra_bytes"]) <= 64, name  # numbers that Python wraps
        if name.endswith(", chunked"):
            assert side["extra_of_plain"] < 0.1
            plain = sides[name.replace("chunked", "two logit tensors")]
            assert side["gradient_error"] <= 2 * plain["gradient_error"]


@pytest.mark.slow  # a benchmark
def test_offloaded_blocks_hold_less(run):
    sides = run("offload_step")["sides"]
    assert sides["all blocks"]["activations_of_plain"] < sides["one block"]["activations_of_plain"] < 1
    assert sides["one block"]["copied_bytes"] * 4 < sides["all blocks"]["copied_bytes"]


@pytest.mark.slow  # every optimizer
def test_optimizers_are_compared_by_bytes_and_by_time(run):
    found = run("optimizer_step")
    sides = found["sides"]
    assert sides["adamw"]["bytes_per_parameter"] == pytest.approx(16, rel=0.2)
    # 8 bytes a parameter less, and on a CPU five fp32 buffers of the largest parameter, for the step, more
    assert sides["adamw8bit, step in backward"]["bytes_per_parameter"] < 0.65 * sides["adamw"]["bytes_per_parameter"]


@pytest.mark.slow  # a benchmark, and two interpreters
def test_an_optimizer_that_is_not_installed_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = run("optimizer_step")
    assert found["left_out"] == ["adamw8bit, step in backward: bitsandbytes is not installed"]
    assert "adamw8bit, step in backward" not in found["sides"]


@pytest.mark.slow  # a benchmark
def test_the_trainer_is_timed_against_a_loop_by_hand(run, monkeypatch):
    """On a clock that only the two sides move: three seconds a step in the trainer, two by hand."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark, seconds = importlib.import_module("no_lever"), [0.0]
    stepped, counted = benchmark.Stepper.step, benchmark.counted

    def in_trainer(self, *args, **kwargs):
        seconds[0] += 3
        return stepped(self, *args, **kwargs)

    def in_loop(*args):
        seconds[0] += 2
        return counted(*args)

    monkeypatch.setattr(benchmark.Stepper, "step", in_trainer)
    monkeypatch.setattr(benchmark, "counted", in_loop)
    monkeypatch.setattr(benchmark, "SMALL", (("cpu8", 1, 8), ("cpu8", 2, 8)))
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    found = run("no_lever")
    for case in found["cases"]:
        assert (case["trainer_seconds"], case["by_hand_seconds"], case["ratio"]) == (3, 2, 1.5)


@pytest.mark.slow  # searches, and trains at what was found
def test_the_longest_sequence_is_run_and_stays_within_its_budget(run):
    found = run("longest_sequence")
    assert found["within_budget"]
    assert found["measured_bytes"] == pytest.approx(found["predicted_bytes"], rel=0.001)
    assert found["above"][1] > found["budget_bytes"]


def test_a_device_that_is_not_here_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("loss_head").main(["--device", "cuda"])
    assert caught.value.code == 2
    assert "finds no CUDA device" in capsys.readouterr().err


def test_packed_and_padded_rows_are_compared_by_their_tokens(run):
    found = run("packing")
    for case in found["cases"].values():
        assert all(0 < fill <= 1 for fill in case["fill"].values())
        speed = case["tokens_per_second"]
        assert case["of_ideal"] == pytest.approx(speed["packed"] / speed["padded"] * case["fill"]["padded"])
    assert found["best_fit"]["fill"] > 0.999


@pytest.mark.keeps("training-recomputes-losses-bit")
@pytest.mark.slow  # a benchmark: two trainings
def test_planned_steps_have_the_losses_of_plain_ones_at_half_the_peak(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    leave_out_pictures(monkeypatch)
    benchmark = importlib.import_module("planned_steps")
    results, picture = tmp_path / "results.json", tmp_path / "picture.png"

    benchmark.main(["--small", "--output", str(results), "--png", str(picture)])

    found = json.loads(results.read_text())
    plain, planned = found["sides"]["plain"], found["sides"]["planned"]
    assert planned["losses"] == plain["losses"]
    assert len(set(plain["losses"])) == found["steps"]
    assert planned["measured_peak_bytes"] <= 0.5 * plain["measured_peak_bytes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    planned["losses"][3] += 1e-7
    with pytest.raises(AssertionError, match="losses: the planned training has others"):
        benchmark.demand_identical(found["sides"], found["steps"])


@pytest.mark.keeps("training-recomputes-losses-bit")
def test_the_committed_figures_of_planned_steps_are_those_of_two_hundred_identical_ones(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("planned_steps")
    found = json.loads((BENCHMARKS / "results" / "planned_steps.json").read_text())
    benchmark.demand_identical(found["sides"], benchmark.STEPS)
    assert not found["environment"]["dirty"]


@pytest.mark.slow  # captures a decoder's block twice
def test_captured_blocks_are_bit_equal_in_their_benchmark(run):
    check_captured(run("captured"), cases=1)


def test_the_committed_figures_of_captured_blocks_are_those_of_their_promise():
    found = json.loads((BENCHMARKS / "results" / "captured.json").read_text())
    check_captured(found, cases=4)
    for case in found["cases"].values():
        assert case["captured, recompute all"]["seconds"] < case["torch checkpoint"]["seconds"]


def check_captured(found, cases):
    assert len(found["cases"]) == cases
    for case in found["cases"].values():
        assert all(way["bit_equal"] for name, way in case.items() if "compiled" not in name)  # which rounds otherwise
        assert case["captured, keep all"]["peak_bytes"] <= case["plain"]["peak_bytes"]
        assert case["captured, recompute all"]["peak_bytes"] <= case["torch checkpoint"]["peak_bytes"]


@pytest.mark.slow  # three trainings, each in a process of its own
@pytest.mark.parametrize("work", ["adapters", "all"])
def test_streamed_training_is_resident_training_in_less_memory_than_the_weights(work, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    path = tmp_path / "streamed.json"
    asked = ["--small", "--work", work, "--steps", "3", "--folder", str(tmp_path), "--output", str(path)]
    importlib.import_module("streamed").main(asked)
    check_streamed(json.loads(path.read_text())["results"], [work])
    assert [each.name for each in tmp_path.iterdir()] == ["streamed.json"]


def test_the_committed_figures_of_streamed_training_are_below_the_weights_and_bit_equal():
    found = json.loads((BENCHMARKS / "results" / "streamed.json").read_text())["results"]
    check_streamed(found, found)
    row = found["all"]["rows"]["every one"]
    assert row["measured_host_peak_bytes"] < row["limit_bytes"] < found["all"]["weights_bytes"]


def check_streamed(found, works):
    for work in works:
        rows = found[work]["rows"]
        assert all(row["losses_equal"] and row["weights_equal"] for row in rows.values())
        for row in rows.values():
            if row["predicted_peak_bytes"] is not None:
                assert abs(row["predicted_peak_bytes"] - row["measured_peak_bytes"]) <= 2048, "numbers Python wraps"
        assert any(row["limit_bytes"] for row in rows.values())
