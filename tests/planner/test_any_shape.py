"""Blocks are found by what runs, whatever holds them: every such model is planned, within the budget and bit-equal."""

import pytest
import torch
import torch.nn.functional as F
from model_shapes import CASES, Block, LanguageModel, token_ids
from torch import nn

from round_device import round_device
from tightfit import Plan, plan, verify
from tightfit.errors import CannotFit
from tightfit.levers.recompute.lever import matching_modules
from tightfit.planner.blocks.find import find_blocks
from tightfit.runtime.module_paths import globs_of
from tightfit.step import model_loss
from tiny import allocator_peak

BLOCKS = {
    "module_dict": ["layers.0", "layers.1", "layers.2"],
    "attributes": ["block1", "block2", "block3"],
    "plain_list": ["blocks.0", "blocks.1", "blocks.2"],
    "plain_tuple_of_dicts": ["blocks.0.mix", "blocks.0.wide", "blocks.1.mix", "blocks.1.wide"],
    "nested_lists": ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"],
    "stage_modules": ["stage1.blocks.0", "stage1.blocks.1", "stage2.blocks.0", "stage2.blocks.1"],
    "shared_block": ["block"],
    "sublayers_in_pairs": ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
    "raw_parameters": ["layers.0", "layers.1", "layers.2"],
    "encoder_and_decoder": [f"transformer.{part}coder.layers.{i}" for part in ("en", "de") for i in (0, 1)],
    "torch_encoder": ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"],
    "experts": ["layers.0", "layers.1"],
    "u_net": ["down1", "down2", "middle", "up2", "up1"],
    "convolutions": ["features"],
    "no_parts": [""],
    "called_twice": ["layers.0", "layers.1", "layers.2"],
    "siamese": ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"],
    "gradient_penalty": ["layers.0", "layers.1", "layers.2"],
    "gradient_of_inputs": ["layers.0", "layers.1", "layers.2"],
}
# Shares of the plain peak. Where too little of a model is in blocks for 0.75, what a plan reaches at least.
BUDGETS = {"u_net": 0.75, "convolutions": 0.85, "no_parts": 0.8, "gradient_penalty": 0.8}


def planned(name):
    """A case with a plan for it."""
    model, batch, loss = CASES[name]()
    how = {"loss": loss, "device": round_device()}
    try:
        return model, batch, loss, plan(model, batch, f"{BUDGETS.get(name, 0.75)}x", **how)
    except CannotFit as error:  # convolutions need more beside them with some instruction sets (SSE4.1)
        return model, batch, loss, plan(model, batch, error.least_bytes, **how)


def blocks_of(model):
    return [choice.path for choice in plan(model, token_ids(), "1.1x", device=round_device()).choices]


@pytest.mark.keeps("however-model-holds-blocks", "loss-calls-model-twice")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_any_shape_is_planned_within_the_budget_and_bit_equal(name, tmp_path):
    model, batch, loss, made = planned(name)
    assert [choice.path for choice in made.choices] == BLOCKS[name]
    measured = allocator_peak(model, batch, loss=loss or model_loss)
    assert made.plain_peak_bytes == pytest.approx(measured, rel=0.001)
    made.to_json(tmp_path / "plan.json")
    read = Plan.from_json(tmp_path / "plan.json")
    fresh, _, _ = CASES[name]()
    report = verify(fresh, batch, read, loss=loss)
    assert report.ok, str(report)
    with read.apply(fresh):
        under_plan = allocator_peak(fresh, batch, loss=loss or model_loss)
    assert under_plan <= made.budget_bytes
    assert made.peak_bytes == pytest.approx(under_plan, rel=0.001)


def test_the_table_of_a_plan_names_the_model_itself():
    assert "the whole model" in str(planned("no_parts")[-1])


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def test_members_of_one_list_are_blocks_though_their_classes_differ():
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(Odd(), Block(), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))

        def body(self, x):
            return self.layers(x)

    assert blocks_of(Model()) == ["layers.0", "layers.1", "layers.2"]


def test_a_block_that_the_step_does_not_run_is_none():
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block() for _ in range(4)])

        def body(self, x):
            return self.layers[2](self.layers[0](x))

    assert blocks_of(Model()) == ["layers.0", "layers.2"]


def test_without_a_step_blocks_are_what_the_model_holds_several_of():
    for name in ("module_dict", "attributes", "nested_lists", "experts", "sublayers_in_pairs"):
        assert find_blocks(CASES[name]()[0]) == BLOCKS[name]
    assert find_blocks(CASES["no_parts"]()[0]) == []


@pytest.mark.keeps("loss-calls-model-twice")
def test_a_gradient_of_gradients_under_a_plan_is_exact_over_several_steps():
    model, batch, loss, made = planned("gradient_penalty")
    other, _, _ = CASES["gradient_penalty"]()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other)]
    with made.apply(other):
        for _ in range(3):
            for m, optimizer in zip((model, other), optimizers, strict=True):
                loss(m, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_blocks_are_named_by_globs_that_match_them_alone():
    found = {
        name: globs_of(BLOCKS[name]) for name in ("module_dict", "attributes", "stage_modules", "u_net", "siamese")
    }
    assert found == {
        "module_dict": ["layers.*"],
        "attributes": ["block[0-9]*"],
        "stage_modules": ["stage[0-9]*.blocks.*"],
        "u_net": ["down[0-9]*", "middle", "up[0-9]*"],
        "siamese": ["encoder.layers.*"],
    }
    for name, globs in found.items():
        model = CASES[name]()[0]
        assert sorted(path for glob in globs for path in matching_modules(model, glob)) == sorted(BLOCKS[name])
    assert matching_modules(CASES["no_parts"]()[0], "") == [""]
    assert matching_modules(CASES["plain_list"]()[0], "blocks.*") == BLOCKS["plain_list"]
