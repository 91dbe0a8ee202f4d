"""Plans for a loop in DistributedDataParallel, made by the processes of the loop themselves."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from round_device import round_device
from tightfit import estimate, plan
from tightfit.errors import InputError, ModelError, RankError
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.rule import every_block
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner import api, shared
from tightfit.planner import request as asked
from tightfit.planner.api import plan_asked as api_plan
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.request import Request
from tightfit.ranks.processes import once
from tightfit.ranks.world import DDPSettings
from tightfit.ranks.wrapping import in_ddp, settings_of_ddp
from tightfit.step import TokenBatch, model_loss

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(2, 16, 67)
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def model(layers=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_layers": layers, "num_heads": 2, "vocab_size": 67}
    return Decoder(DecoderConfig(**sizes, max_position_embeddings=32))


@pytest.fixture
def one_rank():
    """A real process group of this process alone."""
    shown = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    sys.excepthook = shown


def predicted(batch=BATCH, layers=2, **settings):
    return estimate(model(layers), batch, device=round_device(), parallel="ddp", **settings).peak_bytes


@pytest.mark.keeps("buckets-ddp-own-settings")
def test_buckets_are_those_of_the_settings_that_ddp_has():
    weights = sum(4 * p.numel() for p in model(1).parameters())
    small = {"batch": TokenBatch(1, 4, 67), "layers": 1, "world_size": 2}  # so that gradients are there at the peak
    saved = predicted(**small) - predicted(**small, ddp={"gradient_as_bucket_view": True, "device_ids": None})
    assert 0.8 * weights < saved <= weights


# Slow: two further estimates of the same kind, with three micro-batches, 2 s of processor time.
@pytest.mark.keeps("buckets-ddp-own-settings")
@pytest.mark.slow
def test_gradients_lie_beside_the_buckets_where_messages_wait_for_the_last_micro_batch():
    weights = sum(4 * p.numel() for p in model(1).parameters())
    three = {"batch": TokenBatch(3, 4, 67), "layers": 1, "world_size": 2, "micro_batches": 3}
    late = predicted(**three, ddp={"gradient_as_bucket_view": True})
    always = predicted(**three, ddp={"gradient_as_bucket_view": True, "no_sync": False})
    # Without messages in between, the first micro-batches have gradients beside the buckets.
    assert 0.8 * weights < late - always <= weights


@pytest.mark.keeps("loop-your-own-ddp")
def test_a_rank_is_played_beside_the_process_group_that_is_there(one_rank):
    group, names = dist.new_group([0]), dict(dist.distributed_c10d._world.pg_names)
    inside = predicted(layers=1, world_size=2)
    assert dist.group.WORLD is one_rank
    assert dist.distributed_c10d._world.pg_names == names
    for known in (one_rank, group):
        number = torch.ones(1)
        dist.all_reduce(number, group=known)
        assert number.item() == 1.0
    assert dist.get_process_group_ranks(dist.new_group([0])) == [0]
    dist.destroy_process_group(group)
    assert inside == predicted(layers=1)  # of the group of one


SETTINGS = [
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    {"find_unused_parameters": True, "broadcast_buffers": False},
    {"static_graph": True},
]


@pytest.mark.keeps("two-gloo-ranks-run")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_recomputed_blocks_have_the_gradients_that_ddp_has_without(one_rank, settings):
    given = DDPSettings.of(settings)
    gradients = []
    for recomputes in (False, True):
        own = model()
        if recomputes:
            apply_policies(own, every_block(find_blocks(own)).policies)
        joined = in_ddp(own, given)
        assert settings_of_ddp(joined) == given
        for _ in range(2):  # the buckets are made anew in the second step
            own.zero_grad(set_to_none=True)
            model_loss(joined, BATCH.tensors()).backward()
        gradients.append([p.grad for p in own.parameters()])
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients, strict=True))


@pytest.mark.keeps("buckets-ddp-own-settings")
def test_a_batch_in_micro_batches_sends_once(one_rank):
    own = model()
    found = plan(own, BATCH, "4GiB", device=round_device(), parallel="ddp", micro_batches=2)
    applied = found.apply(own)
    joined = DistributedDataParallel(own)
    sends = []

    def loss(model, batch):
        sends.append(joined.require_backward_grad_sync)
        return model_loss(model, batch)

    applied.backward(BATCH.tensors(), loss, model=joined)
    assert sends == [False, True]
    gradients = [p.grad.clone() for p in own.parameters()]
    own.zero_grad(set_to_none=True)
    applied.backward(BATCH.tensors(), loss)
    assert all(torch.equal(p.grad, other) for p, other in zip(own.parameters(), gradients, strict=True))


class Member:
    """A process group as one of its ranks sees it."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def on_two_ranks(monkeypatch):
    """Calls a function on two ranks, each in a thread of its own, and returns what they return or raise."""
    place, store = threading.local(), dist.HashStore()

    def group():
        return getattr(place, "group", None)

    for room in (once, shared, asked):
        monkeypatch.setattr(room, "default_group", group)
    monkeypatch.setattr(once, "store_of_default_group", lambda: store)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def one(rank, call):
        place.group = Member(rank, 2)
        try:
            return call(rank)
        except Exception as error:
            return error

    def run(call):
        # One after the other would wait for ever, so the second one begins in a thread of its own.
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(one, 1, call)
            return [one(0, call), other.result()]

    return run


@pytest.mark.keeps("loop-your-own-ddp")
def test_all_ranks_of_a_loop_have_the_plan_of_rank_0(on_two_ranks, monkeypatch):
    made = []
    monkeypatch.setattr(api, "plan_asked", lambda *args, **kw: made.append(1) or make(*args, **kw))
    optimized = {}

    def call(rank):
        own = model()
        optimized[rank] = torch.optim.SGD(own.parameters(), lr=0.1)
        how = {"optimizer": optimized[rank], "device": round_device(), "parallel": "ddp"}
        return own, plan(own, TokenBatch(4, 32, 67), "0.85x", ddp={"gradient_as_bucket_view": True}, **how)

    make = api_plan
    (own, first), (others, second) = on_two_ranks(call)
    assert made == [1]
    assert first == second
    assert (first.world_size, first.parallel, first.ddp) == (2, "ddp", (("gradient_as_bucket_view", True),))
    assert first.peak_bytes <= first.budget_bytes < first.plain_peak_bytes
    assert any(choice.action != "keep" for choice in first.choices)
    assert first.hash != replace(first, ddp=()).hash
    assert not any(optimized[0].state.values())
    assert own.state_dict().keys() == others.state_dict().keys()
    second.apply(others)


@pytest.mark.keeps("loop-your-own-ddp")
def test_ranks_with_unlike_batches_are_refused_before_anything_is_planned(on_two_ranks, monkeypatch):
    monkeypatch.setattr(api, "plan_asked", None)
    found = on_two_ranks(lambda rank: plan(model(), TokenBatch(2, 16 + rank, 67), "1x", parallel="ddp"))
    for error in found:
        with pytest.raises(RankError, match=r"rank 1 asks for a plan with another batch than rank 0 \(TokenBatch"):
            raise error


def test_a_rank_that_plans_for_one_process_is_warned_once(on_two_ranks, monkeypatch, caplog):
    monkeypatch.setattr(api, "plan_asked", lambda *args, **kw: "a plan")
    with caplog.at_level(logging.WARNING):
        assert on_two_ranks(lambda rank: plan(model(), BATCH, "1x")) == ["a plan"] * 2
    (record,) = caplog.records
    assert "one of 2 ranks, and the plan is for one process without DDP's buckets" in record.getMessage()


@pytest.mark.keeps("buckets-ddp-own-settings")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"ddp": {"bucket_cap_mb": 0}}, "ddp has bucket_cap_mb 0, wanted a number above zero"),
        ({"ddp": {"static_graph": 1}}, "ddp has static_graph 1, wanted True or False"),
        ({"ddp": {"mixed_precision": object()}}, "ddp has 'mixed_precision', with which no rank is predicted"),
        ({"ddp": []}, "ddp is a list, wanted a dict"),
        ({"ddp": {}, "parallel": None}, "give parallel='ddp' too"),
        ({"ddp": {"static_graph": True}, "levers": ["chunked_loss"]}, "DDP copies the logits then"),
        ({"ddp": {"static_graph": True}, "levers": ["micro_batch"]}, "DDP fails with no_sync"),
        ({"ddp": {"static_graph": True}, "micro_batches": 2}, "micro_batches is 2, and DDP's static_graph fails"),
        ({"levers": ["offload"]}, "lever offload and world_size are both given"),
        ({"step_in_backward": True}, "step_in_backward and world_size are both given"),
    ],
)
def test_misuse_is_one_line(arguments, line):
    with pytest.raises(InputError, match=line) as caught:
        plan(model(), BATCH, "1x", device=round_device(), **{"world_size": 2, "parallel": "ddp"} | arguments)
    assert "\n" not in str(caught.value)


def test_levers_are_left_out_where_ddp_copies_what_a_model_returns_or_cannot_wait():
    for settings, allowed in (({}, True), ({"find_unused_parameters": True}, False), ({"static_graph": True}, False)):
        how = {"device": round_device(), "world_size": 2, "parallel": "ddp", "levers": "rounding", "ddp": settings}
        levers = Request.of(model(), BATCH, **how).checked().levers
        assert ("chunked_loss" in levers) is allowed
        assert ("micro_batch" in levers) is ("static_graph" not in settings)


@pytest.mark.keeps("buckets-ddp-own-settings")
def test_a_step_that_another_code_takes_over_is_refused_in_one_line(one_rank):
    joined = in_ddp(model())
    joined.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ModelError, match="with a communication hook, whose memory is not predicted"):
        settings_of_ddp(joined)
    with pytest.raises(InputError, match="this process is a rank of a distributed run already"):
        plan(model(), BATCH, "1x", device=round_device(), world_size=2)


# Slow: two processes import PyTorch, and rank 0 plans, some 20 s of processor time.
@pytest.mark.keeps("two-gloo-ranks-run")
@pytest.mark.slow
def test_the_example_trains_on_two_ranks_within_its_budget():
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/ddp_loop.py"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    figures = re.findall(r"measured peak (\d+), budget (\d+), without the plan (\d+)", ended.stdout)
    assert len(figures) == 2
    for measured, budget, without in figures:
        assert int(measured) <= int(budget) == int(0.6 * int(without))


# Slow: as above, and three plans, some 40 s of processor time.
@pytest.mark.keeps("two-gloo-ranks-run")
@pytest.mark.slow
def test_two_ranks_that_run_a_plan_train_the_bits_of_two_ranks_without():
    script = ROOT / "tests" / "ranks" / "joined_loop.py"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=500, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2 * 4
    for row in rows:
        assert row["same"] == ("equal" if row["exact"] else "close"), row
        assert row["levers"], row
    for settings in {json.dumps(row["settings"]) for row in rows}:
        assert len({row["hash"] for row in rows if json.dumps(row["settings"]) == settings}) == 1
