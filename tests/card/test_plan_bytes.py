"""A plan's peak on a card is the predicted one, whatever the process had allocated before: a plan gives that back."""

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from three_steps import peak_of_the_third
from torch import nn

import tightfit
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ops.weights.low_bit import freeze_in_low_bits
from tightfit.planner.separation import refuse_coupled
from tightfit.runtime.internals import clear_cublas_workspaces
from tightfit.step import model_loss
from tightfit.tracing.build import build_dry
from tightfit.tracing.cuda.allocator import CachingAllocator
from tiny import decoder, token_batch

pytestmark = pytest.mark.usefixtures("nothing_cached")
MIB = 2**20


def left_by_others(logits: int) -> None:
    """Segments a little larger than the step's largest tensors: the allocator takes such and does not split them."""
    kept = [torch.empty(logits + MIB * 7 // 10, dtype=torch.uint8, device="cuda") for _ in range(4)]
    kept.clear()


@pytest.mark.parametrize("levers", ["exact", ["recompute", "capture"]], ids=["recorded", "captured"])
def test_a_plan_takes_its_peak_beside_what_others_left_in_the_allocators_cache(levers):
    batch = token_batch(8, 256)
    build = lambda: decoder(num_layers=4, hidden_size=128, vocab_size=2000)  # noqa: E731
    plan = tightfit.plan(build_dry(build), batch, "0.7x", levers=levers, precision="bf16", device="cuda")
    clear_cublas_workspaces()  # of planning, which asks what a launch takes: a training makes its own
    before = torch.cuda.memory_allocated()
    model, on_card = build().cuda(), {name: tensor.cuda() for name, tensor in batch.items()}
    left_by_others(logits=4 * 8 * 256 * 2000)
    with plan.apply(model):
        peak = peak_of_the_third(model, on_card, "bf16") - before
    assert peak == plan.peak_bytes
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("seed", range(5))
def test_the_simulated_allocator_gives_out_the_blocks_that_pytorchs_does(seed):
    """Few sizes, so that many free blocks are equal: which of them is taken decides what later requests find."""
    drawn, simulated = random.Random(seed), CachingAllocator()
    sizes = [drawn.choice([600, 5 << 10, 3 * MIB, 12 * MIB, 13 * MIB, 24 * MIB, 48 * MIB]) for _ in range(300)]
    live, segments = [], {}  # by the simulated beginning of each, its real one
    with torch.cuda.stream(torch.cuda.Stream()):  # which has pools of its own
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for size in sizes:
            while live and drawn.random() < 0.45:
                simulated.release(live.pop(drawn.randrange(len(live)))[1])
            reserved, tensor = simulated.reserved, torch.empty(size, dtype=torch.uint8, device="cuda")
            block = simulated.allocate(size)
            if simulated.reserved > reserved:
                segments[block.address] = tensor.data_ptr()
            begin = max(address for address in segments if address <= block.address)
            assert tensor.data_ptr() == segments[begin] + block.address - begin
            live.append((tensor, block))
            del tensor
            assert torch.cuda.memory_allocated() - before[0] == simulated.allocated
            assert torch.cuda.memory_reserved() - before[1] == simulated.reserved


def test_samples_are_tried_apart_in_the_hosts_memory():
    """A plan may be made while a training runs, whose budget is for the card."""
    model, batch = decoder().cuda(), {name: tensor.cuda() for name, tensor in token_batch(8, 64).items()}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    refuse_coupled(model, batch, model_loss)
    assert torch.cuda.max_memory_allocated() - before <= 8 * batch["labels"].nbytes  # of the rows that are tried


def test_a_decoder_that_is_built_on_a_card_leaves_no_hole_between_its_weights():
    """Blocks of later steps would lie in it, which no description of the model tells (a plan was 0.3% above its budget
    on an H200).
    """
    config = DecoderConfig(
        vocab_size=6400, hidden_size=768, num_layers=4, num_heads=12, num_kv_heads=4, max_position_embeddings=8192
    )

    def free_now():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)

    def free_bytes_within_segments(build):
        before = free_now()
        model = build()
        assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cuda"}
        return free_now() - before

    def built():
        with torch.device("cuda"):
            return Decoder(config)

    moved = free_bytes_within_segments(lambda: Decoder(config).cuda())
    assert free_bytes_within_segments(built) <= moved


def test_codes_and_scales_in_four_bits_lie_on_the_card_as_predicted():
    """What a block of the allocator has left is too small to be split off where codes come before scales or after."""

    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            wide = [nn.Linear(4096, width, bias=False, dtype=torch.bfloat16) for width in (4608, 4608)]
            self.frozen = nn.Sequential(*wide)
            freeze_in_low_bits(self.frozen, "nf4")
            self.first = nn.Linear(256, 4096, dtype=torch.bfloat16)

        def forward(self, x):
            x = self.first(x)
            return SimpleNamespace(loss=sum(layer(x).float().square().mean() for layer in self.frozen))

    torch.manual_seed(0)
    model, batch = Trains(), {"x": torch.randn(64, 256, dtype=torch.bfloat16)}
    found = tightfit.estimate(model, batch, loss=lambda m, b: m(**b).loss, optimizer="adamw", device="cuda")
    on_card = {name: tensor.cuda() for name, tensor in batch.items()}
    assert peak_of_the_third(model.cuda(), on_card, "fp32") == found.peak_bytes
