"""HSDP: FSDP2 within each node, whose copies of the weights are kept equal: predicted, planned, and run over gloo."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tightfit
from divided_beside_whole import case_of, demand_alike, run
from made_up_devices import even
from tightfit.devices.figures import LINK_SHARE
from tightfit.devices.present import lookup
from tightfit.errors import CannotFit, InputError
from tightfit.integrations.model_ranks import ranks_of_model
from tightfit.levers.micro_batch import as_parts, as_tensors
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ranks.existing_shards import as_before_sharding, sharded_alike, shards_of
from tightfit.ranks.messages import NETWORK_BYTES_PER_SECOND
from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.world import World
from tightfit.ranks.wrapping import mesh_of
from tightfit.runtime.internals import fake_process_group
from tightfit.step import StepSettings, TokenBatch, model_loss
from tightfit.tracing.step import trace_step
from tiny import decoder

pytestmark = [
    pytest.mark.keeps("rank-hsdp-copies"),
    pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed"),
]

BATCH = TokenBatch(2, 16, 65)
RANKS, NODES = 6, 2


def model():
    return Decoder(DecoderConfig(hidden_size=20, num_layers=3, num_heads=2, vocab_size=65))  # rows do not divide


def asked(size=RANKS, parallel="hsdp", nodes=NODES, **settings):
    settings = {"device": even(), "world_size": size, "parallel": parallel, "nodes": nodes, **settings}
    return tightfit.estimate(model(), BATCH, **settings)


def last_rank():
    """Of six ranks, one that sends nothing."""
    return fake_process_group(RANKS - 1, RANKS)


# Slow: four processes, some 20 s of processor time.
@pytest.mark.slow
def test_ranks_compute_what_one_process_does_and_a_plan_changes_no_bit(tmp_path):
    ranks = {"parallel": "hsdp", "nodes": 2, "own_rows": True}
    cases = [
        case_of(**ranks, clip=0.1),
        case_of(**ranks, budget="0.9x"),
        case_of(**ranks, shape={"qk_norm": True, "tie_embeddings": False}, micro_batches=2),
        case_of(**ranks, shape={"num_layers": 4}, precision="bf16", budget="0.9x"),
        case_of(parallel="fsdp2", own_rows=True, clip=0.1, budget="0.9x"),
    ]
    demand_alike(run(tmp_path, 4, cases), cases)


def test_a_rank_holds_its_shard_of_its_nodes_copy():
    found, of_node, of_all = asked(), asked(3, "fsdp2", 1), asked(RANKS, "fsdp2", NODES)
    kinds = ("parameters", "gradients", "optimizer_states")
    for kind in kinds:
        assert found.by_category.get(kind, 0) == of_node.by_category.get(kind, 0)
    more = {mine - one for mine, one in zip(found.rank_peak_bytes, of_node.rank_peak_bytes * NODES, strict=True)}
    assert len(more) == 1
    assert 0 <= more.pop() < 64, "the numbers of a mesh of two dimensions"
    assert len({*found.rank_peak_bytes}) > 1, "the last rank of a node has fewer rows"
    assert of_all.peak_bytes < found.peak_bytes
    assert (found.parallel, found.nodes, found.world_size) == ("hsdp", NODES, RANKS)
    assert "Each of 6 ranks on 2 nodes, with HSDP (FSDP2 within each node)" in str(found)


def test_ranks_of_all_nodes_are_simulated_in_one_process():
    """Muon multiplies whole matrices, so ranks with fewer rows are simulated whole; and the norm is sent around."""
    found = asked(optimizer="muon", grad_clip=1.0)
    first, second = found.rank_peak_bytes[:3], found.rank_peak_bytes[3:]
    assert first == second
    world = World(RANKS, "hsdp", NODES)
    made, settings = model(), StepSettings(grad_clip=1.0)
    parts = as_parts([as_tensors(BATCH)], model_loss)
    of_each = [
        trace_step(own_copy(made), parts, model_loss, settings=settings, rank=SimulatedRank(world, rank, ["layers.0"]))
        for rank in range(RANKS)
    ]
    peaks = [each.peak_bytes for each in of_each]
    assert peaks[:3] == peaks[3:]


def test_a_plan_is_kept_and_says_which_mesh_it_is_of(tmp_path):
    found = tightfit.plan(model(), BATCH, "0.9x", device=even(), world_size=RANKS, nodes=NODES, parallel="hsdp")
    assert max(found.rank_peak_bytes) <= found.budget_bytes
    found.to_json(tmp_path / "plan.json")
    again = tightfit.Plan.from_json(tmp_path / "plan.json")
    assert again.hash == found.hash
    with last_rank():
        (parameter, *_) = found.shard(model()).parameters()
        assert tuple(parameter.device_mesh.mesh.shape) == (2, 3)
        assert parameter.to_local().shape[0] == 65 - 2 * 22
        with pytest.raises(InputError, match=r"the plan is of a mesh of \(2, 3\) ranks, and this one has \(6,\)"):
            found.shard(model(), init_device_mesh("cpu", (RANKS,)))


@pytest.mark.parametrize("nodes", [None, 1, 6])
def test_without_two_nodes_of_two_ranks_there_is_nothing_to_copy(nodes):
    with pytest.raises(InputError, match="hsdp shards the weights within each node and copies them on every one"):
        asked(nodes=nodes)


def test_gradients_go_to_the_other_nodes_at_the_rate_of_a_cards_adapter():
    step = {"device": lookup("h100"), "size": 16}
    of_all, copied = asked(parallel="fsdp2", **step), asked(**step)
    assert copied.communicator_bytes == 2 * of_all.communicator_bytes
    within = LINK_SHARE * lookup("h100").roofline.peer_bytes_per_second
    (sentence,) = (line for line in copied.assumptions if line.startswith("messages between ranks"))
    assert within > LINK_SHARE * NETWORK_BYTES_PER_SECOND
    assert "those between nodes at 37.25 GiB/s" in sentence


def test_a_model_that_somebody_else_copies_on_nodes_is_read_and_simulated():
    held = decoder(num_layers=2, tie_embeddings=False)
    with last_rank():
        mesh = mesh_of(World(RANKS, "hsdp", NODES), "cpu")
        for layer in held.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(held, mesh=mesh)
        found = ranks_of_model(held, "apply_budget")
        assert found.world == World(RANKS, "hsdp", NODES, shards=found.shards)
        assert found.arguments == {"world_size": RANKS, "parallel": "hsdp", "nodes": NODES, "shards": found.shards}
        made = as_before_sharding(held)
        for module in made.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))
        again = sharded_alike(made, found.shards, mesh)
        assert set(shards_of(again, RANKS).units) == set(found.shards.units)


def test_a_remedy_shards_over_all_ranks():
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model(), BATCH, 150_000, device=even(), world_size=RANKS, nodes=NODES, parallel="hsdp")
    ways = caught.value.ways_out
    assert "FSDP2" in str(ways)
