"""Guests whose model is in DistributedDataParallel: one plan for all ranks, and the results of the ranks without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from made_up_devices import even
from tightfit.errors import LeverError
from tightfit.integrations.model_ranks import ALONE, ranks_of_model
from tightfit.integrations.planning import GuestStep, plan_for_all
from tightfit.planner.request import Request
from tiny import decoder, token_batch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")
ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT / "src", ROOT / "tests", ROOT / "tests" / "integrations"]


@pytest.fixture
def one_rank():
    shown = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = shown


@pytest.mark.keeps("hugging-face-trainer-loop")
def test_a_guests_plan_has_the_buckets_of_its_own_ddp(one_rank, monkeypatch):
    monkeypatch.setattr("tightfit.planner.request.lookup", lambda device: even())
    model = decoder(num_layers=1)
    joined = ranks_of_model(DistributedDataParallel(model, gradient_as_bucket_view=True), "MemoryBudget", no_sync=False)
    assert joined.arguments == {
        "world_size": 1, "parallel": "ddp", "ddp": {"gradient_as_bucket_view": True, "no_sync": False},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    plans = [
        plan_for_all(
            GuestStep(Request.of(model, None, optimizer=optimizer, device=torch.device("cpu")), ranks),
            [token_batch(2, 32)],
            "4GiB",
        )
        for ranks in (ALONE, joined)
    ]
    buckets = sum(p.nbytes for p in model.parameters())
    assert [plan.parallel for plan in plans] == [None, "ddp"]
    assert 0 < plans[1].peak_bytes - plans[0].peak_bytes <= buckets
    assert not optimizer.state


@pytest.mark.keeps("hugging-face-trainer-loop")
def test_what_no_rank_is_played_with_is_one_line(one_rank):
    hooked = DistributedDataParallel(decoder(num_layers=1))
    hooked.register_comm_hook(None, lambda state, bucket: None)
    own = DistributedDataParallel(decoder(num_layers=1), process_group=dist.new_group([0]))
    for model, line in (
        (hooked, "MemoryBudget: the model is in DistributedDataParallel with a communication hook"),
        (own, "MemoryBudget: DistributedDataParallel has a process group of its own"),
        (torch.nn.DataParallel(decoder(num_layers=1)), "MemoryBudget: the model is wrapped in DataParallel"),
    ):
        with pytest.raises(LeverError, match=line):
            ranks_of_model(model, "MemoryBudget")
    with pytest.raises(LeverError, match="recover=True repeats a step, and ranks exchange gradients in it"):
        ranks_of_model(DistributedDataParallel(decoder(num_layers=1)), "MemoryBudget").refuse_recovery("MemoryBudget")
    assert ALONE.refuse_recovery("MemoryBudget") is None


# Slow: two processes import the guest and train twice, and one plan is made, a minute of processor time for each.
@pytest.mark.keeps("hugging-face-trainer-loop")
@pytest.mark.slow
@pytest.mark.parametrize("guest", ["lightning", "trainer", "splitting", "accelerate"])
def test_two_ranks_of_a_guest_train_what_they_train_without_a_budget(guest, tmp_path):
    script = ROOT / "tests" / "integrations" / "joined_guests.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), guest, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, PATHS)), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=580, env=environment)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]
    assert {row["rank"] for row in rows} == {0, 1}
    for row in rows:
        assert row["equal"] or (guest == "splitting" and row["close"]), row
        assert row["levers"]
        assert row["ranks"] == [2, "ddp"]
        assert 0.85 * row["predicted"] < row["measured"] <= row["budget"] < row["plain"], row
        assert 0.85 * row["plain_predicted"] < row["plain"] <= row["plain_predicted"], row
        assert row["predicted"] <= row["budget"]
    if guest != "lightning":  # whose ranks plan for their own batches
        assert len({row["hash"] for row in rows}) == 1
