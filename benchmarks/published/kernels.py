"""Predicts the published peaks of Liger-Kernel's own operators, with its own code and kernels, and compares.

    python -m benchmarks.published.kernels --packages FOLDER

Needs triton. FOLDER has one folder for each version of liger_kernel that the rows were measured with: `0.4.2` from
`pip install --no-deps --target FOLDER/0.4.2 liger-kernel==0.4.2`, and `b5672a15` with `src/liger_kernel` of that
commit of its repository. The rows are in kernels.json. Writes benchmarks/results/published_kernels.json.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.environment import environment
from benchmarks.published.liger import LIGER
from benchmarks.published.peaks import HERE, Row, compare, described, rows
from benchmarks.published.process import CARDS, peak_of

ROWS = HERE / "kernels.json"
RESULTS = HERE.parent / "results" / "published_kernels.json"


def packages() -> dict[str, list[Row]]:
    """The rows by the version of the package that they were measured with."""
    content = json.loads(ROWS.read_text("utf-8"))
    versions = [series["package"] for series in content["series"] for _ in series["rows"]]
    found: dict[str, list[Row]] = {}
    for name, row in zip(versions, rows(ROWS), strict=True):
        found.setdefault(name, []).append(row)
    return found


def predicted(row: Row) -> int:
    """Bytes, with the package that is on the path."""
    script = LIGER[row.work]
    return peak_of(lambda: script(row.configuration, row.mode, row.provider), CARDS[row.card], handles=row.blas_handles)


def run(name: str) -> list[dict[str, Any]]:
    results = []
    for row in packages()[name]:
        result = described(row) | compare(row, predicted(row)) | {"package": name}
        results.append(result)
        what = f"{row.work} {row.mode} {row.configuration}"
        print(f"{what}: {row.published} {row.unit}, {result['error']:+.4%}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="the folder with the versions of the package")
    parser.add_argument("--only", help="predict the rows of this version, which is on the path, and print them")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options.only)))
        return
    results = []
    for name in packages():  # each in a process of its own: two versions of a package do not go into one
        path = os.pathsep.join([str(options.packages / name), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "benchmarks.published.kernels", "--only", name]
        ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
        results += json.loads(ran.stdout.splitlines()[-1])
    where = environment()
    where["versions"]["triton"] = version("triton")
    RESULTS.write_text(json.dumps({"environment": where, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
