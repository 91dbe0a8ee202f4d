"""Runs the jobs of a workflow of .github/workflows on this machine, step by step, as far as it can.

    python tools/run_workflow.py checks [--job static] [--list]

Each job gets a clone of its own. A job is left out where its system or its Python is not here. Steps that `uses` an
action are done (checkout, setup-python) or left out by name. The end of the output is a table of what ran.
"""

import argparse
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
SYSTEMS = {"ubuntu": "Linux", "macos": "Darwin", "windows": "Windows"}
DONE_HERE = ("actions/checkout", "actions/setup-python")
EXPRESSION = re.compile(r"\$\{\{\s*([\w.-]+)\s*\}\}")


class Done(NamedTuple):
    """What became of a step."""

    job: str
    step: str
    outcome: str
    seconds: float = 0.0


def combinations(job: Mapping[str, Any]) -> list[dict[str, str]]:
    """The values of a job's matrix, one dict for each of its runs."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    more = matrix.pop("include", [])
    crossed = (
        [dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())] if matrix else []
    )
    return [*crossed, *more] or [{}]


def with_values(text: Any, values: Mapping[str, str]) -> str:
    """A text with the matrix's values in it. What else GitHub would fill in stays empty."""
    return EXPRESSION.sub(lambda found: str(values.get(found[1].removeprefix("matrix."), "")), str(text))


def reason_against(job: Mapping[str, Any], values: Mapping[str, str]) -> str | None:
    """Why a job cannot run here."""
    system = with_values(job["runs-on"], values).partition("-")[0]
    if SYSTEMS.get(system) != platform.system():
        return f"needs {system}"
    if "environment" in job or job.get("permissions", {}).get("contents") == "write":
        return "publishes"
    for step in job["steps"]:
        if step.get("uses", "").startswith("actions/setup-python"):
            version = with_values(step["with"]["python-version"], values)
            if python_of(version) is None:
                return f"no Python {version} here"
    return None


def python_of(version: str) -> str | None:
    found = shutil.which(f"python{version}")  # which may be a shim for a Python that is not there
    if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    return sys.executable if version == ".".join(platform.python_version_tuple()[:2]) else None


def steps_run(name: str, job: Mapping[str, Any], values: Mapping[str, str], clone: Path) -> Iterator[Done]:
    """Run the steps of a job in its clone, up to the first that fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VIRTUAL_ENV", "PYTEST"))}
    for step in job["steps"]:
        said = step.get("name") or step.get("uses") or step["run"].strip().splitlines()[0]
        action = step.get("uses", "")
        if action.startswith("actions/checkout"):
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            yield Done(name, said, "done: a clone")
        elif action.startswith("actions/setup-python"):
            python = python_of(with_values(step["with"]["python-version"], values))
            environment["PYTHON"] = str(python)
            yield Done(name, said, f"done: {python}")
        elif action:
            yield Done(name, said, "left out: an action of GitHub's")
        else:
            start = time.monotonic()
            extra = {key: with_values(value, values) for key, value in step.get("env", {}).items()}
            command = ["bash", "-e", "-o", "pipefail", "-c", with_values(step["run"], values)]
            code = subprocess.run(command, cwd=clone, env=environment | extra).returncode
            yield Done(name, said, "passed" if code == 0 else f"FAILED: {code}", time.monotonic() - start)
            if code:
                return


def outcomes(workflow: Mapping[str, Any], only: str | None, listing: bool) -> Iterator[Done]:
    for key, job in workflow["jobs"].items():
        if only not in (None, key):
            continue
        for values in combinations(job):
            name = f"{key} ({', '.join(map(str, values.values()))})" if values else key
            if why := reason_against(job, values):
                yield Done(name, "all", f"left out: {why}")
            elif listing:
                yield Done(name, "all", "can run here")
            else:
                with tempfile.TemporaryDirectory() as folder:
                    yield from steps_run(name, job, values, Path(folder, "clone"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", choices=sorted(path.stem for path in WORKFLOWS.glob("*.yml")))
    parser.add_argument("--job", help="only this one")
    parser.add_argument("--list", action="store_true", help="say what can run here, and run nothing")
    options = parser.parse_args()
    workflow = yaml.safe_load((WORKFLOWS / f"{options.workflow}.yml").read_text("utf-8"))
    done = list(outcomes(workflow, options.job, options.list))
    for one in done:
        print(f"{one.job:40} {one.step:45} {one.outcome:35} {one.seconds:6.0f} s")
    raise SystemExit(any(one.outcome.startswith("FAILED") for one in done))


if __name__ == "__main__":
    main()
