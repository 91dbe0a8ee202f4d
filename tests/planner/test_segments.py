import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tightfit.devices.present import lookup
from tightfit.errors import CannotFit
from tightfit.levers.recompute.rule import every_block
from tightfit.planner import api
from tightfit.planner.levers import CapturedBlocks, TiledModules
from tightfit.planner.request import Request, Tracer
from tightfit.planner.search.candidates import Candidate
from tightfit.planner.search.last_resorts import join_segments, segment_counts
from tightfit.planner.search.search import Search
from tiny import decoder, token_batch


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8, 32, 80])
def test_every_length_of_the_longest_segment_is_tried_once(blocks):
    counts = segment_counts(blocks)
    assert counts == sorted(set(counts), reverse=True)
    longest = [longest_segment(blocks, count) for count in counts]
    assert longest == sorted(set(longest))
    assert len(counts) <= 2 * math.sqrt(blocks)


def longest_segment(blocks, count):
    paths = [str(block) for block in range(blocks)]
    joined = every_block(paths, segments=count).joined
    ends = [place for place, path in enumerate(paths) if path not in joined]
    return max(b - a for a, b in itertools.pairwise([-1, *ends]))


class Shallow(nn.Module):
    """A block that holds hardly more inside than its output, so that outputs are what a deep model is made of."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).tanh()


@pytest.fixture
def least(monkeypatch):
    """What a plan of sixteen shallow blocks says of the least peak, and which blocks it tried to join."""
    # Else products take a workspace each, from torch 2.15 on, and that is more than the optimizer's step takes.
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    tried, part = [], Tracer.part

    def noted(self, combination, policies, plain, joined=(), **how):
        tried.append(joined)
        return part(self, combination, policies, plain, joined, **how)

    monkeypatch.setattr(Tracer, "part", noted)

    def said(width, rows, optimizer):
        model, batch = nn.Sequential(*(Shallow(width) for _ in range(16))), (torch.ones(rows, width),)
        asked = {"optimizer": optimizer, "device": lookup("rtx4090"), "loss": lambda m, b: m(*b).square().mean()}
        with pytest.raises(CannotFit) as caught:
            api.plan(model, batch, 1, **asked)
        return caught.value, [joined for joined in tried if joined]

    return said


def test_blocks_are_joined_where_that_lowers_the_peak(least):
    rows, width = 2**16, 64
    refusal, tried = least(width, rows, "sgd")
    assert [len(joined) for joined in tried] == [16 - count for count in segment_counts(16)]
    assert "reached by 16 of 16 blocks recompute, 8 of them joined to the next" in str(refusal)
    # the outputs of eight blocks, the input, and what one block takes in backward: without joining, eight outputs more
    output = 4 * rows * width
    assert refusal.least_bytes < 16 * output


def test_nothing_is_joined_where_the_optimizers_own_step_is_the_least_peak(least):
    refusal, tried = least(512, 1, "adamw")
    assert "held up in optimizer" in str(refusal)
    assert tried == []


@pytest.mark.parametrize("captured_peak", [50, 150])
def test_segments_join_the_blocks_of_the_least_without_captured_ones(captured_peak):
    request = Request.of(decoder(num_layers=4), token_batch(2, 8), levers=["rounding", "capture"], device="rtx4090")
    search = Search(request.checked(), 1)
    plain, tiled = request.plain, TiledModules(("layers.0",), 4)

    def considered(combination, peak):
        search.consider(Candidate(combination, {}, (), replace(search.plain, levels=(peak,))), "one")

    considered(plain, 200)
    considered(plain.with_lever(tiled), 100)
    considered(plain.with_lever(CapturedBlocks(tuple(search.paths))), captured_peak)  # without capture it is above
    joined = []
    search.trace_applied = lambda combination, *args, **how: joined.append(combination) or search.joinable
    search.tracer = SimpleNamespace(part=lambda *args, **how: replace(search.plain, levels=(1,)))
    join_segments(search)
    assert joined
    assert {combination.get(TiledModules) for combination in joined} == {tiled}


def test_a_card_too_small_for_a_budget_is_said_to_be_what_does_not_fit():
    small = replace(lookup("rtx4090"), memory_bytes=2**20)
    with pytest.raises(CannotFit, match=r"the step cannot fit RTX 4090: .* of 1.00 MiB: the least is"):
        api.plan(decoder(num_layers=2), token_batch(1, 8), "10GiB", device=small)
