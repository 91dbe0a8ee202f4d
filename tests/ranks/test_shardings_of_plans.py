"""What a plan chooses of FSDP2: what is sharded by itself, what stays gathered, and when gradients are exchanged."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from round_device import round_device
from tightfit import Plan, estimate, plan
from tightfit.devices.present import lookup
from tightfit.devices.spec import HOST_BYTES_PER_SECOND
from tightfit.errors import CannotFit, InputError
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.api import plan_asked
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.request import Request
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.planner.search.search import Search
from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.world import Sharding, World
from tightfit.ranks.wrapping import change_sharding, in_fsdp2, modules_apart
from tightfit.step import TokenBatch, forward_backward, model_loss
from tightfit.tracing.copies import TO_DEVICE, TO_HOST
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.step import trace_step

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(4, 8, 301)
APART = ("embedding", "head")


def decoder(**settings) -> Decoder:
    torch.manual_seed(0)
    settings = {"tie_embeddings": False} | settings
    return Decoder(DecoderConfig(hidden_size=24, num_layers=2, num_heads=2, vocab_size=301, **settings))


def slow_card(bytes_per_second: float):
    known = lookup("h100")
    return replace(known, roofline=replace(known.roofline, peer_bytes_per_second=bytes_per_second))


def peak(made: Decoder, sharding: Sharding, micro_batches: int = 1) -> int:
    rank = SimulatedRank(World(2, sharding=sharding), 0, find_blocks(made))
    parts = as_parts(split_batch(BATCH.tensors(), micro_batches), model_loss)
    return trace_step(own_copy(made), parts, model_loss, rank=rank).peak_bytes


@pytest.fixture(scope="module")
def made_apart() -> Plan:
    made = decoder()
    return plan(made, BATCH, below_plain(made), device=round_device(), world_size=2, levers=[])


@pytest.fixture(scope="module")
def of_one_process() -> Plan:
    return plan(decoder(), BATCH, "1x", device=round_device(), levers=[])


@pytest.fixture
def group(made_apart, of_one_process):  # in whose context no plan of ranks is made
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def below_plain(made: Decoder) -> int:
    """A budget that the plain step fits with embedding and head apart, and not without."""
    budget = peak(made, Sharding(apart=APART)) + UNSEEN_BYTES
    assert budget < peak(made, Sharding())
    return budget


def test_large_modules_that_share_no_weight_can_be_apart():
    assert modules_apart(decoder(), ["layers.0", "layers.1"]) == APART
    assert modules_apart(decoder(tie_embeddings=True), ["layers.0", "layers.1"]) == ()
    assert modules_apart(decoder(), [""]) == ()  # a block that is the whole model


@pytest.mark.slow  # two plans of ranks
@pytest.mark.keeps("embedding-head-apart-takes")
def test_embedding_and_head_are_apart_where_the_plan_needs_their_memory():
    made = decoder()
    found = plan(made, BATCH, below_plain(made), device=round_device(), world_size=2, levers=[])
    plain = estimate(made, BATCH, device=round_device(), world_size=2).peak_bytes
    assert found.sharded_apart == APART
    assert found.plain_peak_bytes == plain > found.budget_bytes
    assert found.peak_bytes == peak(made, found.sharding) <= found.budget_bytes
    assert "embedding and head are sharded by themselves." in " ".join(str(found).split())
    assert plan(made, BATCH, "1x", device=round_device(), world_size=2, levers=[]).sharded_apart == ()


@pytest.mark.slow  # two plans of ranks
@pytest.mark.keeps("embedding-head-apart-takes")
def test_gradients_are_exchanged_once_where_messages_take_the_step():
    made = decoder()
    given = {"micro_batches": 4, "device": slow_card(1e6), "world_size": 2, "levers": ["micro_batch"]}
    once, each = (plan(made, BATCH, budget, **given) for budget in ("2x", "1x"))
    assert (once.reduces_once, each.reduces_once) == (True, False)
    assert once.step_seconds < each.step_seconds
    assert once.peak_bytes > each.peak_bytes
    assert any("gradients exchanged in the last micro-batch" in row.levers for row in each.rejected)
    fast = plan(made, BATCH, "2x", **{**given, "device": slow_card(1e30)})
    assert not fast.reduces_once
    one = plan(made, BATCH, "2x", **{**given, "micro_batches": 1})
    assert not one.reduces_once


def test_accumulated_gradients_are_whole_where_they_are_exchanged_once():
    made = decoder()
    whole = sum(4 * p.numel() for p in made.parameters())
    each, once = (peak(made, Sharding(reduces_once=is_once), 3) for is_once in (False, True))
    assert each + whole // 4 < once <= each + whole + 4096  # peaks of different moments, and gradients of one more


@pytest.mark.slow  # a plan of ranks
def test_a_plan_says_its_choices_in_json_and_in_its_hash(made_apart):
    found = made_apart
    written = found.to_dict()
    assert (list(written["sharded_apart"]), written["reduces_once"]) == (list(APART), False)
    assert Plan.from_dict(written) == found
    assert len({found.hash, replace(found, sharded_apart=()).hash, replace(found, reduces_once=True).hash}) == 3
    older = {name: value for name, value in written.items() if name not in ("sharded_apart", "reduces_once")}
    assert Plan.from_dict(older) == replace(found, sharded_apart=())


OF_CARD = decoder(), BATCH


def traced_on_card(sharding: Sharding, micro_batches: int = 1):
    asked = Request.of(*OF_CARD, device="rtx 4090", world_size=2, micro_batches=micro_batches, grad_clip=1.0)
    return Search(asked.checked().but(world=World(2, sharding=sharding)), "1x").plain


@pytest.mark.keeps("cards-offload-named-nothing")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_shards_on_the_host_take_no_memory_of_the_card(micro_batches):
    here, there = (traced_on_card(Sharding(on_host=is_there), micro_batches) for is_there in (False, True))
    shards = [s.bytes for s in here.storages if s.born == 0 and s.died is None and s.name in WEIGHTS]
    assert len(shards) == len(WEIGHTS)
    first = there.by_category(0)
    assert here.by_category(0)[Category.OPTIMIZER_STATE] == 2 * sum(shards)
    assert first[Category.OPTIMIZER_STATE] == 0
    assert here.by_category(0)[Category.PARAMETER] - first[Category.PARAMETER] == sum(shards)
    gradients = [there.by_category(at)[Category.GRADIENT] for at in range(len(there.levels))]
    assert max(gradients[there.end_of_forward :]) <= max(4 * p.numel() for p in OF_CARD[0].parameters()) + 512
    copies = [o.name for o in there.operators if o.name in (TO_DEVICE, TO_HOST)]
    # The root's weights are gathered once, those of blocks again in backward. Each gradient leaves.
    blocks = sum(len(list(layer.parameters())) for layer in OF_CARD[0].layers)
    assert copies.count(TO_DEVICE) == micro_batches * (len(WEIGHTS) + blocks)
    assert copies.count(TO_HOST) == micro_batches * len(WEIGHTS)


WEIGHTS = [name for name, _ in OF_CARD[0].named_parameters()]


@pytest.mark.keeps("cards-offload-named-nothing")
def test_the_update_of_shards_on_the_host_takes_the_hosts_time():
    trace = traced_on_card(Sharding(on_host=True))
    update = [o for o in trace.operators if o.phase is Phase.OPTIMIZER and not o.name.startswith("c10d")]
    assert not any(o.device_seconds for o in update)
    # AdamW reads weights, gradients and two states, and writes all but the gradients.
    moved = 7 * sum(4 * p.numel() // 2 for p in OF_CARD[0].parameters())
    assert sum(o.seconds for o in update) >= moved / HOST_BYTES_PER_SECOND


@pytest.mark.slow  # plans of ranks
@pytest.mark.sampled(1)
@pytest.mark.keeps("cards-offload-named-nothing")
@pytest.mark.parametrize("levers", [[], ["offload"]])
def test_shards_are_on_the_host_where_that_was_allowed_and_nothing_else_fits(levers):
    made, batch = OF_CARD
    given = {"world_size": 2, "device": "rtx 4090", "levers": levers}
    budget = traced_on_card(Sharding(apart=APART, on_host=True)).peak_bytes + UNSEEN_BYTES
    with pytest.raises(CannotFit) if "offload" not in levers else nullcontext():
        found = plan(made, batch, budget, **given)
        assert found.shards_on_host
        shards = sum(-(-p.shape[0] // 2) * p[0].numel() * 4 for p in made.parameters())
        # As many gradients, and twice as many states, which are counted as a card's allocator rounds them.
        assert 4 * shards <= found.host_bytes <= 4 * shards + 2 * 512 * len(WEIGHTS)
        assert found.sharding.on_host
        assert Plan.from_dict(found.to_dict()) == found
        assert "are on the host" in " ".join(str(found).split())
    assert not plan(made, batch, "1x", **given).shards_on_host


def test_on_a_cpu_shards_are_on_the_host_already():
    with pytest.raises(InputError, match="lever offload and world_size are both given"):
        plan(*OF_CARD, "1x", world_size=2, device=round_device(), levers=["rounding", "offload"])


@pytest.mark.keeps("embedding-head-apart-takes")
@pytest.mark.usefixtures("group")
def test_a_plan_shards_a_model_as_it_was_planned(made_apart):
    made, alone = decoder(), replace(made_apart, world_size=1, reduces_once=True)
    with alone.apply(made) as applied:
        assert alone.shard(made) is made
        assert {path for path, each in made.named_modules() if isinstance(each, FSDPModule)} == {
            "", "layers.0", "layers.1", *APART,
        }  # fmt: skip
        applied.backward(BATCH.tensors())
    with made.no_sync():
        assert not made._get_fsdp_state()._fsdp_param_group.reduce_grads
    assert made._get_fsdp_state()._fsdp_param_group.reduce_grads


@pytest.mark.usefixtures("group")
def test_a_plan_of_other_ranks_or_of_no_ranks_shards_nothing(made_apart, of_one_process):
    made = decoder()
    with pytest.raises(InputError, match="the plan is of 2 ranks, and there are 1: plan again"):
        made_apart.shard(made)
    with pytest.raises(InputError, match="not one of FSDP2, HSDP, tensor or context parallel: plan with world_size"):
        of_one_process.shard(made)
    assert not any(isinstance(each, FSDPModule) for each in made.modules())


def test_without_a_process_group_there_is_nothing_to_shard_over(made_apart):
    with pytest.raises(InputError, match="no process group was made"):
        made_apart.shard(decoder())


@pytest.mark.keeps("embedding-head-apart-takes", "cards-offload-named-nothing")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_are_those_of_the_plain_model(chunked):
    from tightfit.levers.chunked_loss import apply_chunked_loss

    def gradients(sharding: Sharding | None) -> list[torch.Tensor]:
        made = decoder()
        if chunked:
            apply_chunked_loss(made, "head", 8)
        if sharding is not None:
            in_fsdp2(made, find_blocks(made), dist.init_device_mesh("cpu", (1,)), sharding)
        parts = as_parts(split_batch(BATCH.tensors(), 2), model_loss)
        forward_backward(made, parts, model_loss)
        return [p.grad if sharding is None else p.grad.to_local() for p in made.parameters()]

    plain = gradients(None)
    choices = Sharding(apart=APART), Sharding(False, APART, True), Sharding(reduces_once=True), Sharding(on_host=True)
    for sharding in choices:
        for mine, other in zip(gradients(sharding), plain, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.slow  # a plan of ranks
def test_a_model_that_is_sharded_already_keeps_its_units():
    made = decoder()
    budget = below_plain(made)
    asked = Request.of(made, BATCH, device=round_device(), world_size=2, levers=[], parallel="fsdp2")
    assert plan_asked(asked.but(apart=APART), budget).sharded_apart == APART
    with pytest.raises(CannotFit):
        plan_asked(asked.but(apart=()), budget)


@pytest.mark.usefixtures("group")
def test_a_sharded_model_does_what_another_choice_would_have_made_of_it():
    made, mesh = decoder(), dist.init_device_mesh("cpu", (1,))
    in_fsdp2(made, find_blocks(made), mesh, Sharding(False, APART, True))

    def frees() -> dict[str, bool]:
        units = {path: each for path, each in made.named_modules() if isinstance(each, FSDPModule) and path}
        return {path: each._get_fsdp_state()._fsdp_param_group._reshard_after_forward for path, each in units.items()}

    assert set(frees().values()) == {False}
    change_sharding(made, Sharding(apart=APART))
    assert frees() == {"layers.0": True, "layers.1": True, "embedding": True, "head": False}
    assert "no_sync" not in vars(made)
    change_sharding(made, Sharding(False, APART, True))
    assert set(frees().values()) == {False}
    assert "no_sync" in vars(made)
