"""The workflows are read as GitHub reads them, and their commands are those of the Makefile."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMMANDS = {
    "jobs": {
        "one": {
            "runs-on": "${{ matrix.os }}",
            "strategy": {"matrix": {"os": ["ubuntu-latest", "macos-latest"], "word": ["a", "b"]}},
            "steps": [{"run": "echo ${{ matrix.word }} > said && test $(cat said) = a"}, {"run": "true"}],
        },
        "two": {"runs-on": "ubuntu-latest", "environment": "pypi", "steps": [{"run": "false"}]},
    }
}


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    return importlib.import_module("run_workflow")


@pytest.mark.parametrize("path", WORKFLOWS, ids=[path.stem for path in WORKFLOWS])
def test_every_job_has_a_machine_steps_and_no_more_rights_than_it_says(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert len({"uses", "run"} & step.keys()) == 1
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_python_and_torch_are_tried_as_far_as_the_package_says(runner):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text("utf-8"))["jobs"]
    runs = runner.combinations(jobs["tests"])
    pinned = re.fullmatch(r"torch==(.*)", (ROOT / "constraints.txt").read_text("utf-8").strip())
    tried = {run["torch"] for run in runs}
    assert {run["python"] for run in runs} == {"3.11", "3.12", "3.13", "3.14"}
    assert tried > {"2.11.0", "2.12.0", "newest"}
    assert len(tried) == 4
    assert pinned is None or pinned[1] in tried  # a job of the workflow writes that file for its own release
    assert len(runs) == 2 * 4 + 3


def test_a_job_stops_at_the_step_that_fails_and_others_are_left_out_by_name(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.tempfile, "TemporaryDirectory", lambda: _Folder(tmp_path))
    (tmp_path / "clone").mkdir()
    done = [(one.job, one.outcome) for one in runner.outcomes(COMMANDS, None, False)]
    assert done == [
        ("one (ubuntu-latest, a)", "passed"),
        ("one (ubuntu-latest, a)", "passed"),
        ("one (ubuntu-latest, b)", "FAILED: 1"),
        ("one (macos-latest, a)", "left out: needs macos"),
        ("one (macos-latest, b)", "left out: needs macos"),
        ("two", "left out: publishes"),
    ]


class _Folder:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return str(self.path)

    def __exit__(self, *_):
        return None
