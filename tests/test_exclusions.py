"""The table of exclusions is what is refused, in its words, and what the documentation shows."""

from pathlib import Path

import pytest

from tightfit import maximise
from tightfit import names as table
from tightfit.errors import TightfitError
from tightfit.levers.recompute import recompute
from tightfit.planner.levers.page import exclusions, levers_page
from tightfit.step import TokenBatch
from tightfit.training.config import load_config, parse_config
from tiny import VOCABULARY, decoder

PAGE = Path(__file__).resolve().parent.parent / "docs" / "levers.md"


def configured(*overrides):
    return lambda: parse_config({}, overrides)


def largest_batch():
    model = decoder()
    maximise(lambda n: (model, TokenBatch(n, 8, VOCABULARY)), "1GB", what="batch_size", micro_batches="auto")


TOGETHER = {
    table.STEP_IN_BACKWARD_AND_CLIPPING: configured("training.step_in_backward=true"),
    table.STEP_IN_BACKWARD_AND_SCALER: configured(
        "training.step_in_backward=true", "training.grad_clip=null", "training.precision=fp16"
    ),
    table.BUDGET_AND_RECOMPUTE: configured("memory.budget=1GiB", "memory.recompute.segments=2"),
    table.BUDGET_AND_COMPILED_BLOCKS: configured("memory.budget=1GiB", "memory.compile_blocks=true"),
    table.RECOMPUTE_AND_COMPILED_BLOCKS: configured("memory.recompute={}", "memory.compile_blocks=true"),
    table.SEGMENTS_AND_REENTRANT: lambda: recompute(decoder(), "layers.*", segments=2, use_reentrant=True),
    table.CHUNKED_ATTENTION_AND_DROPOUT: configured("model.attention=chunked", "model.attention_dropout=0.1"),
    table.WINDOW_AND_DROPOUT: configured("model.attention_window=16", "model.attention_dropout=0.1"),
    table.EXPERTS_AND_TILES: configured("model.num_experts=4", "model.mlp_tile=64"),
    table.LARGEST_BATCH_AND_COUNTED_MICRO_BATCHES: largest_batch,
}


def test_every_exclusion_is_tried_here():
    assert set(TOGETHER) == set(exclusions())


@pytest.mark.keeps("levers-exclude-other-refused")
@pytest.mark.parametrize("exclusion", exclusions(), ids=lambda e: f"{e.one} and {e.other}")
def test_what_excludes_each_other_is_refused_with_the_reason_and_what_to_do(exclusion):
    with pytest.raises(TightfitError) as caught:
        TOGETHER[exclusion]()
    line = str(caught.value)
    assert f"exclude each other, since {exclusion.reason}: {exclusion.remedy}" in line
    assert "\n" not in line


@pytest.mark.keeps("levers-exclude-other-refused")
def test_the_page_is_made_from_the_levers():
    assert PAGE.read_text("utf-8") == levers_page(), "run python -m tightfit.planner.levers.page > docs/levers.md"


def test_the_keys_that_exclude_each_other_are_allowed_one_at_a_time(tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text("training: {step_in_backward: true, grad_clip: null, precision: bf16}\nmemory: {recompute: {}}\n")
    assert load_config(path).training.step_in_backward
