"""Published peaks of Liger-Kernel's own operators: the page says what the file says, and the package runs dry."""

import importlib
import json
import logging
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Operators whose allocations no release of the package has changed since the rows were measured.
UNCHANGED = ("cross_entropy", "geglu", "layer_norm", "rope", "swiglu")


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.published.kernels")


def results() -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / "published_kernels.json").read_text("utf-8"))["results"]


@pytest.mark.keeps("published-peaks-liger-kernel")
def test_the_results_are_of_the_rows_and_every_row_is_within_a_percent(kernels):
    described = [kernels.described(row) for group in kernels.packages().values() for row in group]
    assert [{name: result[name] for name in described[0]} for result in results()] == described
    of_a100 = [row for row in results() if row["card"] == "a100-80" and row["provider"] == "liger"]
    assert len(of_a100) >= 20
    assert max(abs(row["error"]) for row in results()) <= 0.01


@pytest.mark.slow(reason="needs triton and liger_kernel, which the environment does not have")
def test_the_package_that_is_installed_is_predicted_within_a_percent(kernels, request):
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    logging.disable()  # pytest keeps what the package logs, exceptions with the frames that hold tensors included
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    rows = [row for group in kernels.packages().values() for row in group if row.work in UNCHANGED]
    for work in UNCHANGED:
        row = next(row for row in rows if row.work == work)
        assert abs(kernels.compare(row, kernels.predicted(row))["error"]) <= 0.01, work
