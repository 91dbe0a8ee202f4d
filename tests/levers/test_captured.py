"""Captured blocks: the same bits and bytes as eager code, fewer of both with a policy, and plain where that fails."""

import copy
import importlib
import logging
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from blocks_with_dropout import BATCH, TOKENS, Model
from torch import nn
from torch.utils.checkpoint import checkpoint
from trap_cases import CASES
from trap_levers import RandomPolicy

import tightfit
from exactness import Outcome, allocator_record, assert_bit_equal, differences, run
from tightfit.errors import LeverError
from tightfit.levers.captured.lever import MOST_SHAPES, CapturedForward
from tightfit.levers.recompute import KEEP_ALL, OFFLOAD_ALL, RECOMPUTE_ALL, Policy
from tightfit.step import StepSettings
from tiny import Stack, allocator_peak, decoder, token_batch

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks

POLICIES = {"keep all": KEEP_ALL, "recompute all": RECOMPUTE_ALL}


def two_micro_batches(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """A loss whose first half has left its gradients already."""
    first = model(ids)
    first.backward()
    return model(ids.flip(0)) + first.detach()


def levers(policy: Policy, pattern: str = "layers.*"):
    return lambda model: tightfit.capture(model, pattern, policy=policy)


def uncaptured(caught: list) -> list[str]:
    return [str(warning.message) for warning in caught if "without being captured" in str(warning.message)]


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 32


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """Two blocks with dropout. Their capture is shared by the tests below, since all blocks of a kind share it."""
    torch.manual_seed(0)
    model = Model()
    model.layers = model.layers[:2]
    return model


@pytest.mark.keeps("captured-blocks-leave-loss")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_captured_blocks_compute_the_bits_of_eager_code(small, ids, policy):
    plain = run(copy.deepcopy(small), ids, two_micro_batches)
    captured = copy.deepcopy(small)
    assert_bit_equal(plain, run(captured, ids, two_micro_batches, levers=levers(policy)))
    captured.zero_grad()
    assert_bit_equal(plain, run(captured, ids, two_micro_batches, levers=levers(policy)))
    assert not any("forward" in vars(module) for module in captured.modules())


@pytest.mark.keeps("captured-step-takes-predicted")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_captured_step_takes_the_predicted_bytes_and_no_more_than_eager_code_or_a_checkpoint(small, ids, policy):
    def loss(model, batch):
        return model(batch["ids"])

    batch = {"ids": ids}
    beside = copy.deepcopy(small)
    if policy == RECOMPUTE_ALL:
        for layer in beside.layers:
            layer.forward = by_checkpoint(layer.forward)
    model = copy.deepcopy(small)
    with tightfit.capture(model, "layers.*", policy=policy):
        predicted = tightfit.estimate(model, batch, loss=loss).peak_bytes
        assert predicted == allocator_peak(model, batch, loss=loss)
    assert predicted <= allocator_peak(beside, batch, loss=loss)


def by_checkpoint(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_names_state_and_results_without_gradients_are_those_of_the_model(small, ids):
    model = copy.deepcopy(small)
    kind, names = type(model.layers[0]), list(model.state_dict())
    with tightfit.capture(model, "layers.*"), torch.no_grad():
        torch.manual_seed(0)
        captured = model(ids)
        assert isinstance(model.layers[0], kind)
        assert list(model.state_dict()) == names
        assert vars(model.layers[0])["forward"].captures == 0
        twin = pickle.loads(pickle.dumps(model))
    torch.manual_seed(0)
    assert torch.equal(captured, model(ids).detach())
    assert isinstance(vars(twin.layers[0])["forward"], CapturedForward)
    tightfit.undo(twin)
    assert "forward" not in vars(twin.layers[0])


class Broken(nn.Module):
    """A block that dynamo records only in parts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.tanh() + x


@pytest.mark.keeps("trap-recompute-too-captured")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_blocks_that_cannot_be_captured_whole_run_all_the_same_and_say_so_once(policy):
    torch.manual_seed(0)
    model, x = Stack(*(Broken() for _ in range(3))), torch.randn(8, 16)
    plain = run(copy.deepcopy(model), x)
    with pytest.warns(UserWarning, match=r"layers\.0: blocks of Broken run without being captured: .*graph_break") as w:
        assert_bit_equal(plain, run(model, x, levers=levers(policy)))
    assert len(uncaptured(w.list)) == 1


def test_what_cannot_be_captured_by_request_is_refused_in_one_line(small):
    model = copy.deepcopy(small)
    with pytest.raises(LeverError, match="no module matches"):
        tightfit.capture(model, "nothing.*")
    with pytest.raises(LeverError, match=r"layers\.0: a captured block keeps or recomputes"):
        tightfit.capture(model, "layers.*", policy=OFFLOAD_ALL)
    with tightfit.capture(model, "layers.0"), pytest.raises(LeverError, match=r"layers\.0 is already captured"):
        tightfit.recompute(model, "layers.*")
    model.layers[0].forward = lambda x: x
    with pytest.raises(LeverError, match=r"layers\.0: its forward was replaced"):
        tightfit.capture(model, "layers.*")


@pytest.mark.keeps("captured-blocks-notice-hooks")
def test_gradients_of_gradients_are_refused_in_one_line(small, ids):
    model = copy.deepcopy(small)
    with tightfit.capture(model, "layers.*"):
        loss = model(ids)
        with pytest.raises(LeverError, match="a captured block gives no gradients of gradients"):
            torch.autograd.grad(loss, model.layers[0].qkv.weight, create_graph=True)


@pytest.mark.keeps("captured-blocks-notice-hooks")
@pytest.mark.slow  # captures eight shapes
def test_a_block_that_meets_too_many_shapes_runs_plainly_for_further_ones_and_says_so_once():
    def captured(x):
        return type(model(x).grad_fn).__name__ == "CapturedBlockBackward"

    model = Stack(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    sizes = range(1, MOST_SHAPES + 4)
    with warnings.catch_warnings(record=True) as caught, tightfit.capture(model, "layers.*"):
        warnings.simplefilter("always")
        for size in sizes:
            x = torch.randn(size, 8)
            plain = copy.deepcopy(model)
            tightfit.undo(plain)
            assert_bit_equal(run(plain, x), run(model, x))
            model.zero_grad()
        assert [captured(torch.randn(size, 8)) for size in sizes] == [size <= MOST_SHAPES for size in sizes]
    assert len(uncaptured(caught)) == 1
    assert f"more than {MOST_SHAPES} shapes" in uncaptured(caught)[0]


@pytest.mark.keeps("captured-blocks-leave-loss", "captured-step-takes-predicted")
@pytest.mark.slow  # eight captures of a decoder's block
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_decoder_is_bit_equal_and_its_bytes_are_predicted(policy, precision, dropout):
    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            return model(**batch).loss

    def accumulated(model, batch):
        loss(model, batch).backward()
        return loss(model, batch)

    def build():
        return decoder(dropout=dropout, num_layers=4, hidden_size=128, tie_embeddings=True).train()

    batch, settings = token_batch(8), StepSettings(precision)
    assert_bit_equal(run(build(), batch, accumulated), run(build(), batch, accumulated, levers=levers(policy)))
    beside = build()
    if policy == RECOMPUTE_ALL:
        for layer in beside.layers:
            layer.forward = by_checkpoint(layer.forward)
    model = build()
    with tightfit.capture(model, "layers.*", policy=policy):
        for count in (1, 2):
            predicted = tightfit.estimate(model, batch, precision=precision, micro_batches=count).peak_bytes
            measured = allocator_peak(model, batch, settings=settings, micro_batches=count)
            assert 0 <= measured - predicted <= 4 * (count - 1), "a number between micro-batches, as without the lever"
            assert measured <= allocator_peak(beside, batch, settings=settings, micro_batches=count)


@pytest.mark.keeps("trap-recompute-too-captured")
@pytest.mark.slow  # two hundred captures
@pytest.mark.filterwarnings("ignore::UserWarning")  # blocks that cannot be captured say so
@pytest.mark.parametrize("policy", [*POLICIES.values(), RandomPolicy(seed=1)], ids=[*POLICIES, "random half"])
@pytest.mark.parametrize("name", CASES)
def test_capture_leaves_every_trap_bit_equal(name, policy):
    def step(applied=None) -> Outcome:
        case = CASES[name]
        return run(*case.build(), case.loss, backward=case.backward, levers=applied)

    assert_bit_equal(step(), step(levers(policy)))


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


@pytest.mark.slow  # captures twelve times
def test_dynamo_logs_nothing_about_its_limit_of_recompilations():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    try:
        for size in range(12):
            model = Stack(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
            with tightfit.capture(model, "layers.*"):
                model(torch.randn(2, 4)).sum().backward()
                model(torch.randn(2 + size, 4)).sum().backward()
    finally:
        logger.removeHandler(handler)
    assert not [line for line in lines if "recompile_limit" in line]


@pytest.mark.keeps("captured-blocks-notice-hooks")
@pytest.mark.slow  # captures three times
def test_a_hook_that_is_registered_later_runs():
    model, x = Stack(Hooked(), Hooked()), torch.randn(4, 16)
    plain = copy.deepcopy(model)
    with tightfit.capture(model, "layers.*"):
        assert_bit_equal(run(plain, x), run(model, x))
        for each in (plain, model):
            each.zero_grad()
            each.layers[0].first.register_forward_hook(lambda module, inputs, output: output * 2)
        assert_bit_equal(run(plain, x), run(model, x))


@pytest.mark.keeps("captured-blocks-notice-hooks")
@pytest.mark.slow  # captures twice
def test_frozen_weights_and_a_retained_graph():
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    model, x = Stack(Hooked(), Hooked()), torch.randn(4, 16)
    model.layers[0].first.requires_grad_(False)
    for policy in POLICIES.values():
        plain = run(copy.deepcopy(model), x, backward=twice)
        assert_bit_equal(plain, run(copy.deepcopy(model), x, backward=twice, levers=levers(policy)))


@pytest.mark.keeps("captured-blocks-notice-hooks")
@pytest.mark.slow  # captures a block with batch norm for each way
def test_evaluation_with_gradients_follows_the_mode():
    model, x = Stack(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    with tightfit.capture(model, "layers.*"):
        for mode in (True, False, True):
            found = differences(run(plain.train(mode), x), run(model.train(mode), x))
            assert not [line for line in found if "forward" not in line]
            for each in (plain, model):
                each.zero_grad()


@pytest.mark.keeps("captured-step-takes-predicted")
@pytest.mark.slow  # captures a block
def test_twenty_steps_leave_the_bytes_of_one():
    model, x = Stack(Hooked(), Hooked()), torch.randn(64, 16)
    with tightfit.capture(model, "layers.*", policy=RECOMPUTE_ALL):

        def step():
            model(x).sum().backward()

        step()
        _, left = allocator_record(lambda: [step() for _ in range(20)])
    assert left == 0


class Twice(nn.Module):
    """A block that uses one weight twice. Autocast casts it once."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.linear(x).tanh())


@pytest.mark.keeps("captured-blocks-notice-hooks")
def test_a_weight_that_autocast_casts_twice_is_left_to_eager_code():
    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    torch.manual_seed(0)
    model, x = Stack(nn.Linear(16, 16), Twice()), torch.randn(8, 16)
    plain = run(copy.deepcopy(model), x, loss)
    with pytest.warns(
        UserWarning, match="blocks of Twice run without being captured: autocast casts one of their weigh"
    ):
        assert_bit_equal(plain, run(model, x, loss, levers=levers(KEEP_ALL, "layers.1")))


@pytest.mark.keeps("captured-blocks-notice-hooks")
@pytest.mark.slow  # captures a block
def test_two_calls_under_autocast_before_one_backward_are_said_to_round_differently():
    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x) + model(x * 2)).float().square().sum()

    model, x = Stack(nn.Linear(16, 16), Hooked()), torch.randn(8, 16)
    with tightfit.capture(model, "layers.1"):
        with pytest.warns(UserWarning, match="blocks of Hooked may round differently: two calls before one backward"):
            loss(model, x).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss(model, x).backward()  # said once


class OwnCheckpoints(nn.Module):
    """Reads one weight in two checkpoints of its own, each perhaps within another one."""

    def __init__(self, is_nested: bool):
        super().__init__()
        self.weight, self.is_nested = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8)), is_nested

    def forward(self, x):
        def inner(x):
            return (x @ self.weight).tanh()

        def outer(x):
            return checkpoint(inner, x, use_reentrant=True) * 0.7

        for _ in range(2):
            x = x + (checkpoint(outer, x, use_reentrant=False) if self.is_nested else outer(x))
        return x


@pytest.mark.parametrize("is_nested", [False, True])
def test_blocks_with_a_reentrant_checkpoint_of_their_own_run_uncaptured(is_nested):
    # Whose backward adds to a weight's gradient by itself, where a program adds up those of the whole block first.
    def model():
        return Stack(*(OwnCheckpoints(is_nested) for _ in range(2)))

    x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
    plain = run(model(), x, times=3)
    x.grad = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_bit_equal(plain, run(model(), x, levers=levers(KEEP_ALL), times=3))
    assert "use_reentrant=True" in uncaptured(caught)[0]


def _dropped(x):
    F.dropout(x, 0.2)


def _noise(x):
    torch.randn_like(x)


def _noise_in_place(x):
    torch.empty(3).uniform_()


def _sum_of_a_part(x):
    F.dropout(x, 0.2).split(4, -1)[0].sum()


@pytest.mark.parametrize("draw", [_dropped, _noise, _noise_in_place, _sum_of_a_part])
def test_blocks_whose_draws_nothing_reads_move_the_generator(draw):
    class Drawing(nn.Linear):
        def forward(self, x):
            draw(x)
            return super().forward(x) + F.dropout(x, 0.1)

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Drawing(8, 8) for _ in range(3))), torch.randn(4, 8)
    plain = run(copy.deepcopy(model), x)
    with pytest.warns(UserWarning, match="nothing reads what aten"):
        found = run(model, x, levers=lambda model: tightfit.capture(model, "*"))
    assert_bit_equal(plain, found)
