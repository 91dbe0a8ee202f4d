"""Models of any size are built and asked about without their memory."""

import random

import numpy
import psutil
import pytest
import torch

from tightfit import TokenBatch, build_dry, estimate
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig


@pytest.mark.keeps("you-query-models-larger")
def test_a_model_larger_than_the_machine_is_estimated():
    before = psutil.Process().memory_info().rss
    config = DecoderConfig(
        hidden_size=16384, num_layers=4, num_heads=128, num_kv_heads=8, intermediate_size=53248, vocab_size=128256,
        max_position_embeddings=8192,
    )  # fmt: skip
    model = build_dry(lambda: Decoder(config))
    size = sum(p.numel() for p in model.parameters())
    answer = estimate(model, TokenBatch(1, 8192, 128256), precision="bf16")
    assert size > 10e9
    assert answer.peak_bytes > 16 * size
    assert psutil.Process().memory_info().rss - before < 500e6


def test_a_dry_model_is_estimated_like_the_real_one():
    config = DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=500)
    batch = TokenBatch(2, 64, 500)
    assert estimate(build_dry(lambda: Decoder(config)), batch).peak_bytes == estimate(Decoder(config), batch).peak_bytes


def test_building_dry_leaves_the_random_generators_alone():
    def build():
        assert random.random() != numpy.random.random()
        return Decoder(DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=500))

    state, pythons, numpys = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    build_dry(build)
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == pythons
    assert (numpy.random.get_state()[1] == numpys).all()
