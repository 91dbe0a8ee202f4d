"""Seconds of messages between ranks, worked out by hand."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from round_device import round_device
from tightfit import TokenBatch, estimate
from tightfit.devices.present import lookup
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.ranks.messages import NETWORK_BYTES_PER_SECOND, rate_of, sent_bytes
from tightfit.ranks.world import World

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(1, 16, 64)


def card(peer_bytes_per_second):
    known = lookup("h100")
    return replace(known, roofline=replace(known.roofline, peer_bytes_per_second=peer_bytes_per_second))


def tiny():
    return Decoder(DecoderConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=64))


@pytest.mark.keeps("seconds-ranks-cards-include")
def test_cards_talk_at_the_rate_of_their_link_and_nodes_at_that_of_their_networks():
    assert rate_of(lookup("h100"), World(8)) == 0.8 * 450e9
    assert rate_of(lookup("rtx4090"), World(2)) == 0.8 * lookup("rtx4090").roofline.link_bytes_per_second
    assert rate_of(lookup("h100"), World(16, nodes=8)) == 0.8 * 2 * NETWORK_BYTES_PER_SECOND
    assert rate_of(lookup("h100"), World(128, nodes=8)) == 0.8 * 450e9
    assert rate_of(lookup("h100"), World(1)) is None
    assert rate_of(round_device(), World(2)) is None


@pytest.mark.keeps("seconds-ranks-cards-include")
def test_an_all_reduce_sends_what_a_reduction_and_a_gather_send():
    whole, shard = 800, 100
    assert sent_bytes("c10d._allgather_base_.default", [whole, shard], 8) == 700
    assert sent_bytes("c10d._reduce_scatter_base_.default", [shard, whole], 8) == 700
    assert sent_bytes("c10d.allreduce_.default", [whole], 8) == 1400


@pytest.mark.keeps("seconds-ranks-cards-include")
def test_what_outlasts_the_computing_of_a_phase_is_in_its_seconds():
    made, rate, slow = tiny(), 0.8e6, card(1e6)
    weights = sum(4 * p.numel() for p in made.parameters())
    blocks = sum(4 * p.numel() for layer in made.layers for p in layer.parameters())
    found = estimate(made, BATCH, device=slow, world_size=2)
    seconds = found.step_figures.seconds_by_phase
    assert seconds["forward"] == pytest.approx(weights / 2 / rate)
    # Gradients are reduced, and the weights of blocks are gathered again.
    assert seconds["backward"] == pytest.approx((weights + blocks) / 2 / rate)
    assert any("80% of the published rate" in sentence for sentence in found.assumptions)
    fast, endless = (estimate(made, BATCH, device=card(r), world_size=2) for r in (450e9, 1e30))
    assert fast.step_seconds == pytest.approx(endless.step_seconds)
    assert fast.peak_bytes == endless.peak_bytes == found.peak_bytes
    assert fast.step_seconds < sum(seconds.values())
