"""Real processes that talk by gloo, against simulated ranks: their peaks are equal to the byte."""

import importlib.util
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def ranks():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("ranks_benchmark", BENCHMARKS / "ranks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # which its dataclasses look up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        del sys.modules[spec.name]


# Slow: two processes import PyTorch for each case and wait for each other, some 20 s of processor time.
@pytest.mark.keeps(
    "peak-rank-ddp-fsdp2", "rank-context-parallel-whose", "rank-tensor-parallel-holds", "rank-hsdp-copies"
)
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter of allocations is compiled by gcc")
@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
@pytest.mark.parametrize(
    ("parallel", "precision", "reshard"),
    [
        ("fsdp2", "fp32", None),
        ("fsdp2", "bf16", False),
        ("ddp", "fp32", None),
        ("tp", "fp32", None),
        ("cp", "bf16", None),
        ("hsdp", "fp32", False),
        ("hsdp", "bf16", None),
    ],
)
def test_a_simulated_rank_has_the_peak_of_the_real_one(ranks, parallel, precision, reshard):
    shape = ranks.EVEN if parallel == "tp" else ranks.UNEVEN
    case = case_of(ranks, parallel, precision, reshard=reshard, shape=shape)
    with tempfile.TemporaryDirectory() as folder:
        rows = ranks.compare(case, ranks.built(folder))
    assert [row["difference"] for row in rows] == [0] * case.world_size


def case_of(ranks, parallel, precision, **settings):
    """Of two ranks; of HSDP two on each of two nodes."""
    size, nodes = (4, 2) if parallel == "hsdp" else (2, 1)
    return ranks.Case(size, parallel, precision, nodes=nodes, **settings)


# Slow: as above.
@pytest.mark.keeps("embedding-head-apart-takes")
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter of allocations is compiled by gcc")
@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
@pytest.mark.parametrize("choice", [{"apart": True}, {"once": True, "micro_batches": 3}], ids=str)
def test_what_a_plan_may_choose_of_fsdp2_has_the_peak_of_the_real_one(ranks, choice):
    case = ranks.Case(2, "fsdp2", shape=ranks.UNEVEN, **choice)
    plain = replace(case, apart=False, once=False)
    assert ranks.predicted(case, 0)["predicted_bytes"] != ranks.predicted(plain, 0)["predicted_bytes"]
    with tempfile.TemporaryDirectory() as folder:
        rows = ranks.compare(case, ranks.built(folder))
    assert all(row["difference"] in (0, -4) for row in rows)


# Slow: as above, and a plan is searched for each case first, some 30 s of processor time.
@pytest.mark.keeps(
    "plan-holds-ranks-peak", "rank-context-parallel-whose", "rank-tensor-parallel-holds", "rank-hsdp-copies"
)
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter of allocations is compiled by gcc")
@pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
@pytest.mark.parametrize(
    ("parallel", "precision", "budget"),
    [
        ("fsdp2", "bf16", "0.85x"),
        ("ddp", "fp32", "0.85x"),
        ("tp", "fp32", "0.85x"),
        ("cp", "fp32", "0.88x"),
        ("hsdp", "bf16", "0.85x"),
    ],
)
def test_ranks_that_run_a_plan_have_its_peak(ranks, parallel, precision, budget):
    shape = ranks.EVEN if parallel == "tp" else ranks.UNEVEN
    case = case_of(ranks, parallel, precision, shape=shape, budget=budget)
    assert any(choice.action != "keep" for choice in ranks.planned(case).choices)
    with tempfile.TemporaryDirectory() as folder:
        rows = ranks.compare(case, ranks.built(folder))
    # A Python number that PyTorch wraps in a tensor takes 4 bytes, which no dispatch mode sees.
    assert all(row["difference"] in (0, -4) for row in rows)
