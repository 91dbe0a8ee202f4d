"""Ranks of DDP and FSDP2, simulated on one machine."""

import sys

import pytest
import torch
import torch.distributed as dist

from round_device import round_device
from tightfit import estimate
from tightfit.cli.question import Question
from tightfit.errors import InputError, ModelError
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.request import Request
from tightfit.ranks.peaks import rows_of_rank
from tightfit.ranks.simulated import SimulatedRank, own_copy
from tightfit.ranks.world import Sharding, World
from tightfit.step import StepSettings, TokenBatch, model_loss
from tightfit.tracing.cuda.workspace import CONTEXT_BYTES
from tightfit.tracing.step import trace_step

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(2, 16, 67)


def model():
    return Decoder(DecoderConfig(hidden_size=24, num_layers=2, num_heads=2, vocab_size=67))


@pytest.mark.keeps("peak-rank-ddp-fsdp2")
def test_each_rank_of_fsdp2_holds_its_shard_and_ranks_with_fewer_rows_have_lower_peaks():
    made = model()
    before = {name: (p, p.clone()) for name, p in made.named_parameters()}
    one = estimate(made, BATCH, device=round_device())
    found = estimate(made, BATCH, device=round_device(), world_size=3)
    assert found.peak_bytes == max(found.rank_peak_bytes) < one.peak_bytes
    # 67 rows of the embedding: 23, 23 and 21. AdamW has two states in fp32 of each row.
    first, last = ([rows_of_rank(p.shape[0], World(3), rank) for p in made.parameters()] for rank in (0, 2))
    fewer = sum(8 * (a - b) * p[0].numel() for a, b, p in zip(first, last, made.parameters(), strict=True))
    assert fewer > 0
    assert found.rank_peak_bytes == (found.peak_bytes, found.peak_bytes, found.peak_bytes - fewer)
    written = found.to_dict()
    assert [written[name] for name in ("world_size", "parallel", "communicator_bytes")] == [3, "fsdp2", 0]
    assert list(written["rank_peak_bytes"]) == list(found.rank_peak_bytes)
    for name, parameter in made.named_parameters():  # the model itself is untouched
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert not dist.is_initialized()


@pytest.mark.keeps("peak-rank-ddp-fsdp2")
def test_ddp_holds_its_buckets_besides_what_one_process_holds():
    made = model()
    one = estimate(made, BATCH, device=round_device())
    shown = sys.excepthook
    found = estimate(made, BATCH, device=round_device(), world_size=4, parallel="ddp")
    assert sys.excepthook is shown  # `torch.distributed` replaces it
    weights = sum(4 * p.numel() for p in made.parameters())
    # Buckets are as large as all gradients, at every moment of a step. The gradients themselves are there for longer.
    assert one.peak_bytes + weights <= found.peak_bytes <= one.peak_bytes + 2 * weights
    assert set(found.rank_peak_bytes) == {found.peak_bytes}


@pytest.mark.keeps("cards-too-rank-whose")
def test_a_card_is_played_for_each_rank_and_a_rank_with_fewer_rows_has_the_peak_of_its_whole_step():
    made = model()
    found = estimate(made, BATCH, device="h100", precision="bf16", grad_clip=1.0, world_size=5, nodes=5)
    request = Request.of(made, BATCH, device="h100", precision="bf16", world_size=5).checked()
    rank = SimulatedRank(request.world, 4, find_blocks(made), "bf16")
    settings = StepSettings(grad_clip=1.0)  # FSDP2 casts weights itself, without autocast
    whole = trace_step(own_copy(made), request.parts(1), model_loss, settings=settings, role=request.role, rank=rank)
    assert found.rank_peak_bytes[4] == whole.peak_bytes < found.rank_peak_bytes[0]
    assert found.communicator_bytes == 1 << 30
    assert found.context_bytes == CONTEXT_BYTES
    assert any("NCCL" in sentence for sentence in found.assumptions)


@pytest.mark.keeps("cards-too-rank-whose")
def test_the_numbers_of_a_meshs_ranks_are_in_the_hosts_memory():
    made = model()
    request = Request.of(made, BATCH, device="h100", world_size=2).checked()
    rank = SimulatedRank(request.world, 0, find_blocks(made))
    trace = trace_step(own_copy(made), request.parts(1), model_loss, role=request.role, rank=rank)
    numbers = [storage for storage in trace.storages if storage.dtype == "int32" and storage.shape == (2,)]
    assert all(storage.host_bytes and not storage.bytes for storage in numbers), numbers


@pytest.mark.keeps("cards-too-rank-whose")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"world_size": 0}, "world_size is 0, wanted an integer of at least 1"),
        ({"world_size": 8, "nodes": 3}, "8 ranks cannot be spread evenly over 3 nodes"),
        ({"world_size": 2, "parallel": "fsdp"}, "parallel 'fsdp' is not known: choose ddp or fsdp2"),
        ({"parallel": "ddp"}, "parallel is given without world_size"),
        ({"world_size": 2, "step_in_backward": True}, "step_in_backward and world_size are both given"),
    ],
)
def test_misuse_is_one_line(arguments, line):
    with pytest.raises(InputError, match=line):
        estimate(model(), BATCH, device=round_device(), **arguments)


@pytest.mark.keeps("peak-rank-ddp-fsdp2")
def test_gathered_weights_stay_where_they_are_not_freed_after_a_blocks_forward():
    made, parts = model(), as_parts(split_batch(BATCH.tensors(), 1), model_loss)

    def at_end_of_forward(reshard):
        rank = SimulatedRank(World(2, "fsdp2", sharding=Sharding(reshard)), 0, find_blocks(made))
        trace = trace_step(own_copy(made), parts, model_loss, rank=rank)
        return trace.starts[trace.end_of_forward]

    gathered = sum(4 * p.numel() for layer in made.layers for p in layer.parameters())
    assert at_end_of_forward(False) - at_end_of_forward(None) == gathered


@pytest.mark.keeps("cards-too-rank-whose")
def test_options_of_the_command_line_are_checked_before_anything_is_loaded():
    with pytest.raises(InputError, match="world_size is 0"):
        Question.of({"model": "cpu8", "world_size": 0})
    with pytest.raises(InputError, match="nodes is given without world_size"):
        Question.of({"model": "cpu8", "nodes": 2})


@pytest.mark.keeps("cards-too-rank-whose")
def test_what_the_engine_refuses_is_one_line():
    class WithScalar(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return (x * self.scale).sum()

    with pytest.raises(ModelError, match="WithScalar does not run in fsdp2: "):
        estimate(WithScalar(), (torch.ones(4),), device=round_device(), world_size=2)
    assert not dist.is_initialized()


def test_what_fsdp2_gathers_and_reduces_is_allocated_on_streams_of_its_own():
    def streams(rank: SimulatedRank | None) -> set[int]:
        made = Decoder(DecoderConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=64))
        batch = TokenBatch(2, 8, 64).tensors()
        trace = trace_step(own_copy(made), as_parts(split_batch(batch, 1), model_loss), model_loss, rank=rank)
        return {storage.stream for storage in trace.storages}

    assert streams(SimulatedRank(World(2), 0, ["layers.0", "layers.1"])) == {0, 1, 2}
    assert streams(None) == {0}
