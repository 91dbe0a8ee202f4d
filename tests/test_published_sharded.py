"""Published memory of FSDP2's ranks on cards: one row is predicted anew, and the results are of the rows there are."""

import importlib
import json
import statistics
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sharded():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.published.sharded")


def results() -> list[dict]:
    return json.loads((ROOT / "benchmarks" / "results" / "published_sharded.json").read_text("utf-8"))["results"]


@pytest.mark.keeps("ranks-fsdp2-allocate-reserve")
@pytest.mark.slow  # two dry runs of an 8B on ranks
def test_what_a_published_run_allocated_and_reserved_is_predicted(sharded):
    run = [row for row in sharded.rows() if row.source.endswith("6a6f755d")]
    errors = {row.quantity: abs(row.predict() / row.published - 1) for row in run}
    assert errors["allocated"] <= 1e-6
    assert errors["reserved"] <= 0.01  # 0.67% since allocations are replayed in their order, 0.1% before


def test_the_results_are_of_the_rows_that_are_there(sharded):
    described = [sharded.described(row) for row in sharded.rows()]
    assert [{name: result[name] for name in described[0]} for result in results()] == described


def test_rows_that_say_what_they_ran_are_within_a_percent_or_have_a_cause():
    clear = [row for row in results() if row["ambiguous"] is None]
    assert all(row["cause"] for row in clear if abs(row["error"]) > 0.01)
    # Since allocations are replayed in their order, what ranks reserve is 0.7% off (notes/null-card.md), and was 0.2%.
    assert statistics.median(abs(row["error"]) for row in clear) <= 0.01
    assert all(len(row["ambiguous"]) > 20 for row in results() if row["ambiguous"] is not None)
