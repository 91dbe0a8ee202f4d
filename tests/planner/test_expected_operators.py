"""A planned block that runs other operators than its plan was made from."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import tightfit
from tightfit.levers.recompute import KEEP_ALL, Expected, OperatorKey, OtherOperators, Policy, Ran
from tightfit.levers.recompute.lever import apply_policies
from tightfit.levers.recompute.region import forwards_on
from tightfit.planner import plans
from tiny import allocator_peak, decoder, token_batch

EXP = "aten.exp.default"
SECOND_EXP = Policy(frozenset({OperatorKey(EXP, 1, "float32[2]")}))


class Block(nn.Module):
    """Two of its three results are made by `exp`. `beside` runs before them."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = lambda x: None
        self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.beside(x)
        return self.narrow(x).exp().tanh().sum() + self.wide(x).exp().tanh().sum()


def ran_by(block: Block, x: torch.Tensor) -> list[Ran]:
    """The operators that a run of the block calls."""
    policy = Policy(frozenset({OperatorKey("none", 0, "none")}))
    with apply_policies(block, {"": policy}, expected={"": Expected([])}):
        (forward,) = forwards_on(block)
        found: list[Ran] = []
        forward.expected.bind = lambda policy, ran, path: found.extend(ran) or policy  # type: ignore[attr-defined]
        block(x)
    return found


@pytest.fixture
def planned() -> tuple[Block, torch.Tensor, Expected]:
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    return block, x, Expected(ran_by(block, x))


def kept_by(block: Block, policy: Policy, expected: Expected, *inputs: torch.Tensor) -> Policy:
    """The policy of the block after runs on these inputs."""
    with apply_policies(block, {"": policy}, expected={"": expected}):
        (forward,) = forwards_on(block)
        for x in inputs:
            block(x).backward()
        return forward.policy  # type: ignore[attr-defined]


@pytest.mark.filterwarnings(f"error::{OtherOperators.__module__}.OtherOperators")
@pytest.mark.parametrize(
    "beside",
    [
        lambda x: torch.arange(4).to(torch.int32),  # a copy of numbers, as where a cache begins on a card
        lambda x: x.detach().exp_(),  # another operator
        lambda x: x.detach().double().exp(),  # other operands
        lambda x: x.detach()[None].exp(),
    ],
)
def test_a_key_means_the_same_call_whatever_runs_beside_it(planned, beside):
    block, x, expected = planned
    block.beside = beside
    assert kept_by(block, SECOND_EXP, expected, x, x) == SECOND_EXP


def test_a_call_more_of_the_same_kind_is_reported_once_and_the_plan_moves_along(planned):
    block, x, expected = planned
    block.beside = lambda x: x.detach().exp()
    with pytest.warns(OtherOperators) as told:
        after = kept_by(block, SECOND_EXP, expected, x, x)
    assert after.kept == {OperatorKey(EXP, 2, "float32[2]")}
    (warning,) = told
    assert "Operator 0 is aten.exp.default of float32[2] (128 bytes), and was aten.addmm.default" in str(
        warning.message
    )


def test_calls_that_change_places_are_told_apart_by_their_bytes(planned):
    block, x, expected = planned
    block.narrow, block.wide = block.wide, block.narrow
    with pytest.warns(OtherOperators, match="the model: "):
        after = kept_by(block, SECOND_EXP, expected, x)
    assert after.kept == {OperatorKey(EXP, 0, "float32[2]")}


def test_an_operator_that_is_missing_is_named(planned):
    block, x, expected = planned
    block.forward = lambda x: block.wide(x).exp().tanh().sum()  # type: ignore[method-assign]
    both = Policy(frozenset({OperatorKey(EXP, 0, "float32[2]"), OperatorKey("aten.add.Tensor", 0, "numbers")}))
    with pytest.warns(OtherOperators, match="It has no aten.add.Tensor of numbers, which the plan keeps"):
        kept_by(block, both, expected, x)


@pytest.mark.filterwarnings(f"error::{OtherOperators.__module__}.OtherOperators")
def test_another_batch_is_no_difference(planned):
    block, _, expected = planned
    assert kept_by(block, SECOND_EXP, expected, torch.randn(9, 8)) == SECOND_EXP


def test_a_block_that_keeps_everything_is_not_compared(planned):
    block, x, _ = planned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_by(block, KEEP_ALL, Expected([]), x) == KEEP_ALL


def a_plan() -> tuple[nn.Module, tightfit.Plan]:
    model = decoder()
    for budget in ("0.9x", "0.85x", "0.8x", "0.75x"):
        plan = tightfit.plan(model, token_batch(), budget)
        if plan.programs:
            return model, plan
    raise AssertionError("no plan keeps single operators")


def test_a_plan_has_the_operators_of_its_blocks_and_compares_them_in_the_first_step():
    model, plan = a_plan()
    assert {path for program in plan.programs for path in program.paths} == {c.path for c in plan.choices if c.kept}
    again = tightfit.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    with again.apply(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**token_batch()).loss.backward()
    (path, *_) = [choice.path for choice in plan.choices if ("aten.rsqrt.default", 0, "float32[3]") in choice.kept]
    block = model.get_submodule(path)
    forward = block.forward

    def with_one_more(x: torch.Tensor, *args: object) -> object:
        x.detach().square().rsqrt()
        return forward(x, *args)

    block.forward = with_one_more  # type: ignore[method-assign]
    with again.apply(model), pytest.warns(OtherOperators, match=f"^{path}: .* is aten.rsqrt.default of"):
        model(**token_batch()).loss.backward()


def test_a_plan_of_the_format_before_names_operators_without_operands(tmp_path: Path):
    model, plan = a_plan()
    raw = json.loads(json.dumps(plan.to_dict()))
    raw["format"] = plans.FORMAT - 1
    del raw["programs"]
    for choice in raw["choices"]:
        choice["kept"] = [entry[:2] for entry in choice["kept"]]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    earlier = tightfit.Plan.from_json(tmp_path / "plan.json")
    with earlier.apply(model) as applied, warnings.catch_warnings():
        warnings.simplefilter("error")
        applied.backward(token_batch())
    assert {c.path for c in earlier.choices if c.kept} == {c.path for c in plan.choices if c.kept}


class Joining(nn.Module):
    """One block that runs three times, and joins what the runs before it left from the second one on."""

    def __init__(self, is_first_shorter: bool) -> None:
        super().__init__()
        self.inner, self.is_first_shorter = nn.Linear(32, 32), is_first_shorter

    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        if bool(past) == self.is_first_shorter:
            x = torch.cat([x, x.sin()], -1).unflatten(-1, (2, 32)).sum(-2)
        past.append(x)
        return self.inner(x).tanh().exp().tanh() * x


@pytest.mark.parametrize("is_first_shorter", [True, False])
def test_a_block_whose_calls_run_other_operators_has_the_planned_peak(is_first_shorter):
    torch.manual_seed(0)
    model, batch = nn.ModuleList([Joining(is_first_shorter)]), {"x": torch.randn(64, 32)}

    def loss(model, batch):
        x, past = batch["x"], []
        for _ in range(3):
            x = model[0](x, past)
        return x.square().mean()

    plan = tightfit.plan(model, batch, "0.8x", loss=loss, optimizer="sgd", blocks="0")
    with warnings.catch_warnings(), plan.apply(model):
        warnings.simplefilter("error", OtherOperators)
        taken = allocator_peak(model, batch, loss=loss, optimizer="sgd")
    assert taken == pytest.approx(plan.peak_bytes, abs=64)
    assert any(choice.kept for choice in plan.choices), "the plan names operators"
