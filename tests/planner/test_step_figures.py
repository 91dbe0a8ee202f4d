"""What a step tells of the peak: which tensors are there, and where in the step each point of the timeline lies."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from round_device import round_device
from tightfit import Plan, estimate, plan
from tightfit.planner.step_figures import dtypes_of
from tiny import VOCABULARY, decoder, token_batch


@pytest.fixture(scope="module")
def step_figures():
    return estimate(decoder(), token_batch(8)).step_figures


def test_the_largest_tensors_at_the_peak_are_the_logits_and_named_so(step_figures):
    largest = step_figures.top[0]
    assert (largest.shape, largest.dtype, largest.bytes) == ((8 * 96, VOCABULARY), "float32", 4 * 8 * 96 * VOCABULARY)
    assert step_figures.top == tuple(sorted(step_figures.top, key=lambda group: -group.bytes))


@pytest.mark.keeps("estimate-names-tensors-peak")
def test_parameters_and_optimizer_states_go_by_their_names(step_figures):
    named = {group.name: group for group in step_figures.top}
    for name in ("embedding.weight", "embedding.weight exp_avg", "embedding.weight exp_avg_sq"):
        assert named[name].bytes == 4 * VOCABULARY * 64
        assert named[name].operator == ""
    assert named["embedding.weight exp_avg"].category == "optimizer states"


def test_what_differs_only_in_the_blocks_number_is_one_group(step_figures):
    up = next(group for group in step_figures.top if group.name == "layers.*.mlp.up_proj")
    assert (up.count, up.operator) == (3, "aten.mm.default")


@pytest.mark.keeps("estimate-names-tensors-peak")
def test_no_more_bytes_are_named_than_there_are(step_figures):
    for category, size in step_figures.by_category.items():
        assert sum(group.bytes for group in step_figures.top if group.category == category) <= size


def test_every_point_of_the_timeline_has_its_operator_and_module(step_figures):
    count = len(step_figures.timeline_phases)
    assert len(step_figures.timeline_operators) == len(step_figures.timeline_modules) == count
    assert "layers.1.mlp.up_proj" in step_figures.timeline_modules


def test_a_kept_output_knows_the_module_that_makes_it():
    made = plan(decoder(), token_batch(8), "0.7x")
    choice = next(choice for choice in made.choices if choice.action == "operators")
    assert len(choice.kept_modules) == len(choice.kept)
    assert (
        dict(zip(choice.kept, choice.kept_modules, strict=True))["aten.rsqrt.default", 0, "float32[3]"]
        == "attention_norm"
    )
    assert "attention_norm (rsqrt)" in str(made)


@pytest.mark.parametrize(
    ("dtype", "precision", "said"),
    [
        (torch.float32, "fp32", "fp32 weights, no autocast"),
        (torch.float32, "bf16", "fp32 weights, bf16 autocast"),
        (torch.bfloat16, "fp32", "bf16 weights, no autocast"),
    ],
)
def test_an_estimate_and_a_plan_name_the_dtype_of_the_weights_beside_the_precision(dtype, precision, said):
    model, how = decoder().to(dtype), {"precision": precision, "device": round_device()}
    estimated, planned = estimate(model, token_batch(2), **how), plan(model, token_batch(2), "2x", **how)
    assert f"{said}, adamw, round" in str(estimated).splitlines()[0]
    assert str(planned).startswith(f"{said}, adamw, round")
    assert estimated.to_dict()["weights"] == planned.to_dict()["weights"] == said.split()[0]


def test_of_two_dtypes_the_one_of_most_elements_is_named_first():
    small, large = nn.Linear(4, 4), nn.Linear(8, 8)
    assert dtypes_of(nn.Sequential(small, large.bfloat16())) == "bf16 and fp32"
    assert dtypes_of(nn.Sequential(small.bfloat16(), large.float())) == "fp32 and bf16"


def test_a_plan_that_was_written_before_weights_were_named_can_be_read():
    written = Path(__file__).parent / "earlier_plans" / "format_4.json"
    assert "weights" not in json.loads(written.read_text("utf-8"))
    assert str(Plan.from_json(written)).startswith("fp32, adamw, made up")
