import itertools
import math
from dataclasses import replace

import pytest

from tightfit.devices.present import lookup
from tightfit.errors import CannotFit
from tightfit.levers.recompute.rule import every_block
from tightfit.planner import api
from tightfit.planner.request import Tracer
from tightfit.planner.search import segment_counts
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


@pytest.mark.parametrize(("optimizer", "batch", "joins"), [("adamw", (1, 2), False), ("sgd", (4, 96), True)])
def test_blocks_are_joined_only_where_that_can_lower_the_peak(optimizer, batch, joins, monkeypatch):
    """With AdamW and few tokens the optimizer's own step is the least peak; joining blocks changes nothing there."""
    monkeypatch.setenv(
        "TORCH_CUBLAS_WORKSPACE_CACHE", "1"
    )  # or products take a workspace each, more than the step does
    tried = []
    part = Tracer.part

    def noted(self, combination, policies, plain, joined=(), **how):
        tried.append(joined)
        return part(self, combination, policies, plain, joined, **how)

    monkeypatch.setattr(Tracer, "part", noted)
    with pytest.raises(CannotFit):
        api.plan(decoder(num_layers=4), token_batch(*batch), 1, optimizer=optimizer, device=lookup("rtx4090"))
    assert any(tried) == joins


def test_a_card_too_small_for_a_budget_is_said_to_be_what_does_not_fit():
    small = replace(lookup("rtx4090"), memory_bytes=2**20)
    with pytest.raises(CannotFit, match=r"the step cannot fit RTX 4090: .* of 1.00 MiB: the least is"):
        api.plan(decoder(num_layers=2), token_batch(1, 8), "10GiB", device=small)
