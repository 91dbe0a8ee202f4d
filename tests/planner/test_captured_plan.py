"""A plan may capture blocks: what it says of bytes is what the allocator records, and no bit changes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import tightfit
from exactness import assert_bit_equal, run
from made_up_devices import even
from tightfit import Plan
from tightfit.devices.clocks import Clocks
from tightfit.errors import CannotFit, InputError, LeverError
from tightfit.levers.captured import CapturedForward
from tightfit.planner.levers import CapturedBlocks, CompiledBlocks, Recompute
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.tracing.record import OperatorRecord, Phase
from tiny import allocator_peak, decoder, token_batch

LEVERS = ["recompute", "capture"]


@pytest.fixture(scope="module")
def model():
    return decoder(num_layers=3, hidden_size=32, vocab_size=64)


@pytest.fixture(scope="module")
def batch():
    return {name: tensor % 64 for name, tensor in token_batch(4, 32).items()}


@pytest.fixture(scope="module")
def recorded(model, batch):
    return tightfit.plan(model, batch, "0.7x", levers=["recompute"], device=even())


@pytest.fixture(scope="module")
def made(model, batch):
    return tightfit.plan(model, batch, "0.7x", levers=LEVERS, device=even())


def forwards(model):
    return [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]


@pytest.mark.slow  # two plans that capture
@pytest.mark.keeps("plan-captured-blocks-takes")
def test_it_is_predicted_to_be_faster_and_takes_the_predicted_bytes(model, batch, made, recorded):
    assert made.lever(CapturedBlocks) == CapturedBlocks(("layers.0", "layers.1", "layers.2"))
    assert made.lever(Recompute) is not None
    assert all(choice.captured for choice in made.choices)
    assert made.step_seconds < recorded.step_seconds
    with made.apply(model):
        assert {type(forward) for forward in forwards(model)} == {CapturedForward}
        measured = allocator_peak(model, batch)
        assert not any(forward.refused for forward in forwards(model))
    assert made.peak_bytes - UNSEEN_BYTES <= measured <= made.peak_bytes + UNSEEN_BYTES
    assert made.peak_bytes <= made.budget_bytes
    assert forwards(model) == []


@pytest.mark.keeps("plan-captured-blocks-takes")
def test_it_changes_no_bit_and_says_what_captured_blocks_do(model, batch, made):
    def plain(model, batch):
        return model(**batch).loss

    captured = run(model, batch, plain, levers=made.apply)
    assert_bit_equal(run(model, batch, plain), captured)
    assert tightfit.verify(model, batch, made).ok
    text = str(made)
    assert "3 of 3 blocks run as captured programs." in text
    assert "(captured)" in text


@pytest.mark.keeps("plan-captured-blocks-takes")
def test_a_wrong_program_is_found_and_named(model, batch, made, monkeypatch):
    right = CapturedForward.__call__
    monkeypatch.setattr(CapturedForward, "__call__", lambda self, *args, **kw: right(self, *args, **kw) * 1.001)
    report = tightfit.verify(model, batch, made)
    assert not report.ok
    assert report.worst is not None
    assert report.worst.lever == "capture"


def test_its_file_is_read_again_and_files_without_captured_blocks_too(made, recorded, tmp_path):
    made.to_json(tmp_path / "plan.json")
    assert Plan.from_json(tmp_path / "plan.json") == made
    raw = json.loads(json.dumps(recorded.to_dict()))
    for choice in raw["choices"]:
        del choice["captured"]
    assert Plan.from_dict(raw) == recorded


@pytest.mark.slow  # records blocks for four policies
def test_captured_blocks_are_tried_where_recorded_ones_do_not_fit(model, batch):
    with pytest.raises(CannotFit) as caught:
        tightfit.plan(model, batch, "0.01x", levers=["recompute"], device=even())
    budget = caught.value.least_bytes - 1
    plan = tightfit.plan(model, batch, budget, levers=LEVERS, device=even())
    assert plan.lever(CapturedBlocks) is not None
    with plan.apply(model):
        assert allocator_peak(model, batch) <= budget


@pytest.mark.slow  # a plan that captures
@pytest.mark.keeps("plan-captured-blocks-takes")
def test_a_block_that_cannot_be_captured_stays_with_the_recorder_and_is_named_once(batch):
    class Odd(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        @torch._dynamo.disable
        def aside(self, x):
            return x

        def forward(self, x, *args):
            return self.inner(self.aside(x), *args)

    model = decoder(num_layers=4, hidden_size=32, vocab_size=64)
    for place in (1, 3):
        model.layers[place] = Odd(model.layers[place])
    plan = tightfit.plan(model, batch, "0.6x", levers=LEVERS, device=even(), blocks="layers.*")
    assert plan.lever(CapturedBlocks) == CapturedBlocks(("layers.0", "layers.2"))
    assert [choice.captured for choice in plan.choices] == [True, False, True, False]
    named = [row.levers for row in plan.rejected if row.levers.startswith("capture")]
    assert named == ["capture (2 of 4 blocks)"]
    with plan.apply(model):
        assert allocator_peak(model, batch) == pytest.approx(plan.peak_bytes, abs=UNSEEN_BYTES)


def test_where_it_saves_next_to_nothing_no_trace_is_spent_on_it(model, batch):
    device = replace(even(), captured_seconds=even().framework_seconds + even().recording_seconds)
    plan = tightfit.plan(model, batch, "0.7x", levers=LEVERS, device=device)
    assert plan.lever(CapturedBlocks) is None
    assert [row.reason for row in plan.rejected if row.levers == "capture"] == ["would save less than 0.2% of the step"]


def test_it_is_refused_in_one_line_where_its_price_is_not_known(model, batch):
    with pytest.raises(LeverError, match="capture is not available on made up"):
        tightfit.plan(model, batch, "0.7x", levers=LEVERS, device=replace(even(), captured_seconds=None))


@pytest.mark.slow  # two plans for a card
@pytest.mark.keeps("plan-card-captures-blocks")
def test_a_card_that_waits_for_its_host_runs_captured_blocks(model):
    """Operators of a tiny model are launched more slowly than they run, so the executor's own time counts."""
    step = {"batch": {k: t % 64 for k, t in token_batch(64, 64).items()}, "device": "rtx4090", "precision": "bf16"}
    recorded = tightfit.plan(model, budget="0.8x", levers=["recompute"], steps=1, **step)
    plan = tightfit.plan(model, budget="0.8x", levers=LEVERS, **step)
    assert plan.lever(CapturedBlocks) is not None
    assert plan.step_seconds < recorded.step_seconds
    with plan.apply(model):
        assert tightfit.estimate(model, **step).peak_bytes == pytest.approx(plan.peak_bytes, abs=UNSEEN_BYTES)


@pytest.mark.keeps("plan-card-captures-blocks")
def test_what_the_executor_takes_of_the_host_counts_where_a_card_would_wait_for_it():
    shown = ("aten.mm.default", Phase.FORWARD, "", 1e-3, 0, "layers.0", 0, (), (), False)
    busy = OperatorRecord(*shown, alone=Clocks(host=1e-5, device=1e-3))
    assert (busy.seconds_with(5e-5), busy.seconds_with(2e-3)) == (1e-3, 2.01e-3)
    assert OperatorRecord(*shown, executor_seconds=1e-4).seconds_with(0.0) == pytest.approx(9e-4)  # on a CPU


@pytest.mark.slow  # runs the compiler
def test_a_plan_that_may_compile_and_capture_runs_no_block_by_both(model, batch):
    plan = tightfit.plan(model, batch, "0.7x", levers=[*LEVERS, "compile"], device=even())
    assert any(plan.lever(kind) is not None for kind in (CapturedBlocks, CompiledBlocks))
    assert not any(choice.captured and choice.compiled for choice in plan.choices)


@pytest.mark.slow  # captures blocks for two plans
@pytest.mark.keeps("plan-captures-blocks-without")
def test_blocks_are_captured_without_the_levers_name_where_the_steps_repay_it(model, batch, made, recorded):
    asked = {"levers": ["recompute"], "device": even()}
    long = tightfit.plan(model, batch, "0.7x", **asked, steps=10_000_000)
    assert (long.lever(CapturedBlocks), long.peak_bytes) == (made.lever(CapturedBlocks), made.peak_bytes)
    assert tightfit.plan(model, batch, "0.7x", **asked, steps=1) == recorded


@pytest.mark.parametrize("steps", [0, True, 2.5])
def test_a_wrong_number_of_steps_is_refused(steps, model, batch):
    with pytest.raises(InputError, match=f"steps is {steps!r}, wanted"):
        tightfit.plan(model, batch, "1x", device=even(), steps=steps)


WIDE = {"hidden_size": 256, "num_layers": 4, "vocab_size": 2000}
ON_A_CARD = {"batch": tightfit.TokenBatch(8, 512, 2000), "device": "h200", "precision": "bf16"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("steps", "captured"), [(None, True), (1, False)])
def test_a_plan_for_a_card_captures_blocks_unless_a_few_steps_would_not_repay_it(steps, captured):
    model = tightfit.build_dry(lambda: decoder(**WIDE))
    plan = tightfit.plan(model, budget="0.8x", levers=["recompute"], steps=steps, **ON_A_CARD)
    assert (plan.lever(CapturedBlocks) is not None) == captured


@pytest.mark.slow  # a plan beside a step by hand, traced
def test_at_the_peak_of_whole_blocks_recomputed_by_hand_a_plan_for_a_card_is_as_fast():
    model = tightfit.build_dry(lambda: decoder(**WIDE))
    with tightfit.recompute(model, "layers.*"):
        by_hand = tightfit.estimate(model, **ON_A_CARD)
    plan = tightfit.plan(model, budget=by_hand.peak_bytes + UNSEEN_BYTES, levers="exact", **ON_A_CARD)
    assert plan.step_seconds <= by_hand.step_figures.step_seconds


def penalty_of_the_input(model, batch):
    """A critic's loss with a penalty on its gradient at some samples (WGAN-GP)."""
    x = batch["x"][:4].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(batch["x"]).square().mean() + (gradient.norm(dim=-1) - 1).square().mean()


def penalty_of_the_weights(model, batch):
    """A loss with the norm of a gradient at some samples, as in meta learning and sharpness."""
    some = model(batch["x"][:4]).square().mean()
    gradients = torch.autograd.grad(some, [*model.parameters()], create_graph=True)
    return model(batch["x"]).square().mean() + sum(gradient.square().sum() for gradient in gradients)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.sampled(1)
@pytest.mark.keeps("loss-calls-model-twice")
@pytest.mark.parametrize("loss", [penalty_of_the_input, penalty_of_the_weights])
def test_a_loss_with_gradients_of_gradients_is_planned_without_captured_blocks(loss):
    torch.manual_seed(0)
    critic, batch = nn.Sequential(*(Residual() for _ in range(3))), {"x": torch.randn(256, 16)}
    asked = {"loss": loss, "optimizer": "sgd", "device": even()}
    made = tightfit.plan(critic, batch, "0.8x", levers=LEVERS, **asked)
    assert made.lever(Recompute) is not None
    assert made.lever(CapturedBlocks) is None
    assert any("gradients of gradients" in row.reason for row in made.rejected)
    assert tightfit.verify(critic, batch, made, loss=loss).ok
    with made.apply(critic):
        assert allocator_peak(critic, batch, loss=loss, optimizer="sgd") <= made.budget_bytes
