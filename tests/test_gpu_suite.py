"""The suite for a GPU runs on a CPU at small size, predicts before it measures and survives a case that fails."""

import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def suite(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.gpu import __main__ as module

    return module


@pytest.mark.slow  # every case of the suite for cards, small
def test_small_cases_are_predicted_measured_and_summed_up(suite, tmp_path, capsys):
    path = tmp_path / "results" / "small.json"
    assert suite.main(["--small", "--output", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["summary"]["measured"] == len(content["cases"]) == 4
    assert content["summary"]["errors"]["peak_bytes"]["worst"] < 0.001
    assert content["summary"]["within_budget"] == content["summary"]["planned"] == 2
    assert content["environment"]["versions"]["torch"]
    assert "4/4 tiny GPT-2" in capsys.readouterr().out


@pytest.mark.keeps("gpu-suite-predicts-before")
def test_a_prediction_is_in_the_file_before_its_case_runs_and_a_failure_is_recorded(
    suite, tmp_path, monkeypatch, capsys
):
    from benchmarks.gpu import measuring

    path = tmp_path / "failing.json"

    def failing(case, made, device):
        written = json.loads(path.read_text())["cases"][-1]
        assert written["predicted"]["peak_bytes"] > 0
        assert "measured" not in written
        raise RuntimeError("CUDA error: something went wrong\nand more")

    class Here(Thread):  # a thread knows what is replaced here, and keeps the other end of the pipe open
        def __init__(self, target, args):
            super().__init__(target=target, args=(*args[:-1], Connection(os.dup(args[-1].fileno()))))

    monkeypatch.setattr(measuring, "measure", failing)
    monkeypatch.setattr(suite, "PROCESS", Here)
    suite.main(["--small", "--only", "GPT-2", "--output", str(path)])
    content = json.loads(path.read_text())
    assert content["summary"]["failed"] == 1
    assert content["cases"][0]["error"].startswith("RuntimeError: CUDA error")
    assert "FAILED RuntimeError" in capsys.readouterr().out


def test_there_are_at_least_forty_cases_for_a_gpu_each_of_its_own(suite):
    from benchmarks.gpu.cases import MODELS, OPTIMIZERS, all_cases

    cases = list(all_cases())
    assert len(cases) == len({case.name for case in cases}) >= 40
    assert all(case.model in MODELS and case.optimizer in OPTIMIZERS for case in cases)


def test_without_a_gpu_the_suite_says_so(suite, tmp_path, capsys):
    with pytest.raises(SystemExit):
        suite.main(["--output", str(tmp_path / "none.json")])
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.slow  # a benchmark
def test_the_benchmark_of_offload_runs_at_small_size(suite, tmp_path, monkeypatch, capsys):
    from benchmarks.gpu import offload

    monkeypatch.setattr(offload, "PATTERNS", ("layers.0", "layers.*"))
    monkeypatch.setattr(offload, "SHARES", ("0.8x", "0.01x"))
    offload.main(["--small", "--output", str(tmp_path / "small.json")])
    planned, refused, first, everything = json.loads((tmp_path / "small.json").read_text())["results"]
    assert 0 < 2 * first["share_of_activations"] < everything["share_of_activations"] < 1
    assert everything["peak_bytes"] < first["peak_bytes"]
    assert planned["peak_bytes"] <= planned["predicted_bytes"]
    assert "cannot fit" in refused["error"]
    assert "layers.*: " in capsys.readouterr().out


def test_where_the_sources_are_no_checkout_a_benchmark_runs_without_a_commit(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import environment

    assert not environment.is_checkout(tmp_path)
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)  # nor where there is no git
    described = environment.environment()
    assert (described["commit"], described["dirty"]) == (None, False)
