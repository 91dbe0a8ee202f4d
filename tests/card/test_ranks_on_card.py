"""Trainings of several ranks on cards, ours and others', over NCCL."""

import itertools
import json

import pytest
import torch
from divided_ranks import prepare
from measured_ranks import LENGTH, NODES, ROWS, SHAPE
from ranks_on_cards import HERE, run_ranks
from recovering import config

import tightfit
from divided_beside_whole import case_of, demand_alike
from tightfit.devices.present import lookup_present
from tightfit.training.objective import CausalLMLoss
from tightfit.training.sharded.fitting import fit_shards
from tiny import VOCABULARY, decoder, token_batch

SETTINGS = """
model: {{hidden_size: 64, num_layers: 3, num_heads: 4, vocab_size: 400}}
data: {{source: default, max_documents: 20, sequence_length: 128, vocab_size: 400}}
training: {{max_steps: 2, batch_size: 16, precision: bf16, device: cuda, parallel: {parallel}}}
memory: {{budget: 0.8x}}
output: {{folder: {folder}}}
"""


def test_a_rank_of_fsdp2_is_planned_where_a_card_is_in_use():
    """CUDA and autograd's threads are in no fork."""
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    settings = config(training={"device": "cuda", "parallel": "fsdp2", "batch_size": 4}, memory={"budget": "1x"})
    model, batch = decoder(), token_batch()
    assert batch["input_ids"].max() < VOCABULARY
    device = lookup_present("cuda")
    one, two = (fit_shards(model, batch, CausalLMLoss(), settings, device, ranks) for ranks in (1, 2))
    assert two.planned.peak_bytes < one.planned.peak_bytes


MIB = 1 << 20


@pytest.mark.keeps("processes-null-cards-nccl")
def test_ranks_find_what_the_others_sent(tmp_path):
    rows = run_ranks(3, str(HERE / "collectives.py"), folder=tmp_path)
    assert sorted(row["rank"] for row in rows) == [0, 1, 2]
    assert all(row["wrong"] == [] and row["tried"] > 40 and row["unmodelled"] == 0 for row in rows), rows


@pytest.mark.keeps("processes-null-cards-nccl")
def test_a_rank_that_ended_is_an_error_of_the_others(tmp_path):
    (row,) = run_ranks(2, str(HERE / "collectives.py"), "ends", folder=tmp_path)
    assert "another rank ended" in row["error"]


@pytest.mark.slow  # two processes that import a trainer and compute, some 20 seconds each
@pytest.mark.parametrize(
    ("guest", "parallel"),
    [
        *itertools.product(["accelerate", "trainer", "lightning"], ["ddp", "fsdp2"]),
        ("accelerate", "hsdp"),
        ("lightning", "pairs"),  # of blocks, each a unit
    ],
)
def test_ranks_of_a_guest_have_the_predicted_peak_and_the_same_weights(tmp_path, guest, parallel):
    size = 4 if parallel == "hsdp" else 2
    rows = run_ranks(size, str(HERE / "guest_ranks.py"), guest, parallel, folder=tmp_path)
    assert [row["ranks"] for row in rows] == [[size, "fsdp2" if parallel == "pairs" else parallel]] * size
    for row in rows:
        assert row["equal"], "weights differ between ranks"
        assert "recompute" in row["levers"]
        # DDP's buckets are made anew over the remainders of what lay there: up to 1 MiB each in PyTorch's allocator.
        assert row["measured"] - row["predicted"] <= 8192, row


@pytest.mark.slow  # two and four processes, some 15 seconds each
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_have_the_predicted_peak(tmp_path, parallel, ranks):
    """With true values: the loss looks at its labels, and the loop at its losses."""
    (tmp_path / "training.yaml").write_text(SETTINGS.format(parallel=parallel, folder=tmp_path / "run"))
    run_ranks(ranks, str(HERE / "trained_ranks.py"), "{}", "training.yaml", folder=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["measured_peak_bytes"] == result["predicted_peak_bytes"] <= result["budget_bytes"]


def of_ranks(parallel, precision):
    """The number of ranks, and the arguments of a question about them."""
    size = 2 * NODES if parallel == "hsdp" else 2
    step = {"precision": precision, "device": "cuda", "world_size": size, "parallel": parallel}
    return size, step | ({"nodes": NODES} if parallel == "hsdp" else {})


@pytest.mark.keeps("ranks-cards-allocate-reserve")
@pytest.mark.slow  # a plan, and two processes: half a minute for each
@pytest.mark.parametrize("budget", [None, "0.8x"], ids=["plain", "planned"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "hsdp", "tp", "cp"])
def test_ranks_allocate_and_reserve_what_is_predicted(tmp_path, parallel, precision, budget):
    """To the byte. DDP makes its buckets anew in its second step, over what the first one has left."""
    size, step = of_ranks(parallel, precision)
    model, batch, plans = decoder(**SHAPE), token_batch(ROWS, LENGTH), []
    found = tightfit.estimate(model, batch, **step)
    if budget is not None:
        plain, found = found, tightfit.plan(model, batch, budget, levers="exact", **step)
        assert found.peak_bytes < plain.peak_bytes
        plans = [str(tmp_path / "plan.json")]
        found.to_json(plans[0])
    rows = run_ranks(size, str(HERE / "measured_ranks.py"), parallel, precision, *plans, folder=tmp_path)
    assert sorted((row["rank"], row["allocated"]) for row in rows) == [*enumerate(found.rank_peak_bytes)]
    reserved = found.reserved_bytes if budget is None else found.planned.reserved_bytes
    # Parts of weights lie between what the whole ones left: a segment of small blocks more.
    holes = 2 * MIB if parallel == "tp" else 0
    assert 0 <= max(row["reserved"] for row in rows) - reserved <= holes


@pytest.mark.keeps("cards-offload-named-nothing")
@pytest.mark.slow  # a plan, and two or four processes: some 20 seconds for each
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parallel", ["fsdp2", "hsdp"])
def test_ranks_with_their_shards_on_the_host_allocate_and_reserve_what_is_predicted(tmp_path, parallel, precision):
    size, step = of_ranks(parallel, precision)
    found = tightfit.plan(decoder(**SHAPE), token_batch(ROWS, LENGTH), "0.95x", levers=["offload"], **step)
    assert found.shards_on_host
    found.to_json(tmp_path / "plan.json")
    script = [str(HERE / "measured_ranks.py"), parallel, precision, str(tmp_path / "plan.json")]
    rows = run_ranks(size, *script, folder=tmp_path)
    assert sorted((row["rank"], row["allocated"]) for row in rows) == [*enumerate(found.rank_peak_bytes)]
    assert {row["reserved"] for row in rows} == {found.planned.reserved_bytes}


@pytest.mark.keeps("ranks-cards-compute")
@pytest.mark.slow  # two processes that compute four trainings
@pytest.mark.parametrize("parallel", ["hsdp", "tp", "cp"])
def test_ranks_compute_over_nccl_what_one_process_does_and_a_plan_changes_no_bit(tmp_path, parallel):
    shape = {"qk_norm": True, "tie_embeddings": False}
    size, ranks = 2, {"parallel": parallel}
    if parallel == "hsdp":
        size, ranks = 4, {**ranks, "nodes": 2, "own_rows": True}
    cases = [
        case_of(**ranks, clip=0.1),
        case_of(**ranks, budget="0.9x"),
        case_of(**ranks, shape=shape, micro_batches=2),
        case_of(**ranks, shape={"num_layers": 4}, precision="bf16", budget="0.9x"),
    ]
    for number, case in enumerate(cases):
        prepare(case, number, tmp_path, size, "rtx4090")
    rows = run_ranks(size, str(HERE / "divided_on_cards.py"), str(tmp_path), json.dumps(cases), folder=tmp_path)
    demand_alike([row["told"] for row in rows], cases)
