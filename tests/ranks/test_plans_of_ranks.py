"""Plans for several ranks of DDP and FSDP2: one plan for all, within a budget that is each rank's peak."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from round_device import round_device
from tightfit import Plan, estimate, plan
from tightfit.errors import CannotFit, InputError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.rule import every_block
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.blocks.solve import least_peak
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search
from tightfit.ranks.peaks import rows_of_rank
from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.world import World
from tightfit.ranks.wrapping import in_fsdp2
from tightfit.step import TokenBatch, model_loss
from tightfit.tracing.step import trace_step

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(4, 32, 67)
RANKS = 3  # of 67 rows of the embedding: 23, 23 and 21


def model():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(hidden_size=24, num_layers=2, num_heads=2, vocab_size=67))


@pytest.fixture(scope="module")
def made():
    return model()


@pytest.fixture(scope="module")
def sharded(made):
    """A plan with FSDP2 that needs a lever."""
    return plan(made, BATCH, "0.75x", device=round_device(), world_size=RANKS)


def played_with(made, found, rank):
    """The peak of a rank that runs the plan, without the search that found it."""
    simulated = SimulatedRank(World(RANKS, found.parallel, sharding=found.sharding), rank, find_blocks(made))
    own = own_copy(made)
    parts = as_parts(split_batch(BATCH.tensors(), found.micro_batches), model_loss)
    with found.apply(own):
        return trace_step(own, parts, model_loss, rank=simulated).peak_bytes


@pytest.mark.keeps("plan-holds-ranks-peak")
def test_the_peak_of_a_plan_is_that_of_each_rank_that_runs_it(made, sharded):
    plain = estimate(made, BATCH, device=round_device(), world_size=RANKS).peak_bytes
    assert sharded.plain_peak_bytes == plain
    assert sharded.peak_bytes == max(sharded.rank_peak_bytes) <= sharded.budget_bytes == int(0.75 * plain)
    assert any(choice.action != "keep" for choice in sharded.choices)
    first, last = (played_with(made, sharded, rank) for rank in (0, 2))
    assert sharded.rank_peak_bytes == (first, first, last)
    assert last < first


@pytest.mark.keeps("frees-gathered-weights-after")
def test_a_plan_of_ranks_is_written_with_its_world_and_a_hash_of_what_ranks_have_to_agree_on(sharded, tmp_path):
    sharded.to_json(tmp_path / "plan.json")
    read = Plan.from_json(tmp_path / "plan.json")
    assert read == sharded
    written = sharded.to_dict()
    assert (written["world_size"], written["parallel"], written["communicator_bytes"]) == (RANKS, "fsdp2", 0)
    assert list(written["rank_peak_bytes"]) == list(sharded.rank_peak_bytes)
    assert written["hash"] == read.hash == replace(read, assumptions=(), budget_bytes=0).hash
    assert read.hash != replace(read, reshard_after_forward=not read.reshard_after_forward).hash
    assert read.hash != replace(read, choices=read.choices[1:]).hash
    assert f"All ranks share plan {read.hash}." in " ".join(str(sharded).split())


@pytest.mark.slow  # two plans of ranks
@pytest.mark.keeps("frees-gathered-weights-after")
def test_weights_are_freed_after_forward_where_keeping_them_takes_too_much(made):
    frees, keeps = (plan(made, BATCH, b, levers=[], device=round_device(), world_size=2) for b in ("1x", "4GiB"))
    assert (frees.reshard_after_forward, keeps.reshard_after_forward) == (True, False)
    assert frees.peak_bytes == frees.plain_peak_bytes == keeps.plain_peak_bytes < keeps.peak_bytes


@pytest.mark.keeps("plan-holds-ranks-peak")
@pytest.mark.slow  # a third search, 2 s of processor time
def test_a_plan_for_ddp_has_levers_inside_its_blocks(made):
    found = plan(made, BATCH, "0.85x", device=round_device(), world_size=RANKS, parallel="ddp")
    assert found.reshard_after_forward is None
    assert any(choice.action != "keep" for choice in found.choices)
    assert found.rank_peak_bytes == (played_with(made, found, 0),) * RANKS
    assert found.peak_bytes <= found.budget_bytes == int(0.85 * found.plain_peak_bytes)


# Slow: nothing fits, so that two searches try all they have, 4 s of processor time.
@pytest.mark.keeps("plan-fits-error-least")
@pytest.mark.slow
def test_where_no_rank_fits_the_error_has_the_least_peak_and_no_process_group_is_left(made, sharded):
    with pytest.raises(CannotFit, match="2 of 2 blocks recompute") as caught:
        plan(made, BATCH, 1000, device=round_device(), world_size=RANKS)
    states = sum(8 * rows_of_rank(p.shape[0], World(RANKS), 0) * p[0].numel() for p in made.parameters())
    assert states < caught.value.least_bytes <= sharded.peak_bytes + UNSEEN_BYTES
    ways = caught.value.ways_out
    assert ways
    assert all(way.fits for way in ways.ways)
    assert not dist.is_initialized()


@pytest.mark.keeps("plan-fits-error-least")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"world_size": 2, "levers": ["offload"]}, "lever offload and world_size are both given"),
        ({"world_size": 2, "curve": True}, "a trade-off curve is of one process, and world_size is given"),
        ({"nodes": 2}, "nodes is given without world_size"),
    ],
)
def test_misuse_is_one_line(made, arguments, line):
    with pytest.raises(InputError, match=line):
        plan(made, BATCH, "1x", device=round_device(), **arguments)


@pytest.mark.keeps("fsdp2-computes-same-gradients")
def test_fsdp2_with_levers_computes_the_gradients_that_it_computes_without():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        losses, gradients = [], []
        for levers in ("none", "recompute", "chunked loss"):
            own = model()
            if levers == "recompute":
                apply_policies(own, every_block(find_blocks(own)).policies)
            if levers == "chunked loss":
                apply_chunked_loss(own, "head", 8)
            in_fsdp2(own, find_blocks(own), mesh)
            loss = model_loss(own, BATCH.tensors())
            loss.backward()
            losses.append(loss.detach())
            gradients.append([p.grad.to_local() for p in own.parameters()])
        assert torch.equal(losses[0], losses[1])
        assert all(torch.equal(mine, other) for mine, other in zip(*gradients[:2], strict=True))
        torch.testing.assert_close(losses[2], losses[0])
        torch.testing.assert_close(gradients[2], gradients[0])
    finally:
        dist.destroy_process_group()


def test_prices_of_blocks_leave_out_what_neighbours_gather_and_free_meanwhile():
    # The gathered weights of embedding and head are freed in the first block's forward, and are larger than a block.
    wide = Decoder(DecoderConfig(hidden_size=24, num_layers=3, num_heads=2, vocab_size=2048))
    asked = Request.of(wide, TokenBatch(1, 32, 2048), device=round_device(), world_size=2)
    search = Search(asked.checked(), "1x")
    priced = search.baseline(search.request.plain).priced
    assert all(option.kept_bytes >= 0 for option in priced.chain.options[1])
    least = least_peak(priced.chain)
    applied = search.tracer.whole(search.request.plain, priced.policies(least.choice))
    assert least.peak_bytes == pytest.approx(applied.peak_bytes, rel=0.05)
