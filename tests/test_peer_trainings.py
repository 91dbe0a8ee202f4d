"""Peers of the benchmark run as documented: the same update as the plain step, or a reason why they do not run here."""

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
EXACT = (
    "torch.utils.checkpoint, every block",
    "selective checkpoint, products and attention kept",
    "selective checkpoint, every 2nd product kept",
)


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("peers")


def updated(peers, name):
    """The weights after a step, and the peak of the next one."""
    trained = peers.Trained(peers.CASES["tiny"], peers.Way(name))
    trained.step()
    weights = [parameter.detach().clone() for parameter in trained.model.parameters()]
    return weights, trained.peak()


def test_checkpoints_make_the_plain_update_bit_for_bit_with_less_memory(peers):
    weights, plain = updated(peers, "plain")
    for name in EXACT:
        own, peak = updated(peers, name)
        assert all(map(torch.equal, own, weights)), name
        assert peak < plain, name


def test_pytorchs_loss_head_makes_the_plain_update_to_rounding(peers):
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this PyTorch has none")
    weights, _ = updated(peers, "plain")
    own, _ = updated(peers, "linear_cross_entropy")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own, weights, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("save_on_cpu", "where they are already"),
        ("transformers' checkpointing", "not one of transformers"),
        ("Lightning's checkpointing", "require a GPU"),
    ],
)
def test_a_peer_that_does_not_run_here_says_why(peers, name, reason):
    with pytest.raises(importlib.import_module("peer_trainings").NotHere, match=reason):
        peers.Trained(peers.CASES["tiny"], peers.Way(name))


class Played:
    """A process whose steps take the same seconds each time, but for one round in which everything takes longer."""

    def __init__(self, seconds):
        self.seconds, self.steps = seconds, 0

    def step(self):
        self.steps += 1
        slower = 10 if self.steps == 2 else 1
        return self.seconds * slower, 2 * self.seconds * slower


def test_a_ratio_is_taken_within_a_round(peers):
    reference, fast = peers.Way(peers.REFERENCE), peers.Way("plain")
    found = peers.timed({reference: Played(1.0), fast: Played(0.5)}, reference, 3)
    assert found[fast]["times_as_fast_as_checkpoint"] == 2
    assert found[fast]["median_seconds"] == found[fast]["least_seconds"] == 0.5
    assert peers.timed({reference: Played(1.0)}, reference, 0) == {}


def test_budgets_are_spread_over_the_peaks_of_peers(peers):
    assert peers.spread([100, 100.5, 120, 130, 150, 151, 190], 9) == [100, 120, 130, 150, 190]
    assert peers.spread([100, 100.5, 120, 130, 150, 151, 190], 3) == [100, 130, 190]
    assert peers.spread([100, 200], 1) == [100]
    assert peers.spread([], 4) == []


@pytest.mark.slow  # three processes, each of which imports PyTorch
def test_every_way_has_a_process_and_plans_are_made_at_the_peaks_of_peers(peers, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "BY_HAND", {})
    path = tmp_path / "peers.json"
    how = ["--case", "tiny", "--rounds", "1", "--threads", "1", "--made-up", "--budgets", "1", "--levers", "exact"]
    peers.main([*how, "--peers", "plain", peers.REFERENCE, "save_on_cpu", "--output", str(path)])
    variants = importlib.import_module("json").loads(path.read_text())["results"][0]["variants"]
    budget = variants[peers.REFERENCE]["peak_bytes"]
    (plan,) = (row for row in variants.values() if row["budget_bytes"] is not None)
    assert plan["budget_bytes"] == budget >= plan["peak_bytes"] == plan["predicted_bytes"]
    assert variants[peers.REFERENCE]["times_as_fast_as_checkpoint"] == 1
    assert variants["save_on_cpu"]["empty"].startswith("moves saved tensors")
