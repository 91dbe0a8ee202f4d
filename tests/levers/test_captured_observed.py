"""Captured blocks in steps that others look at, that write buffers, or for which PyTorch's compiler is switched off."""

import copy

import pytest
import torch
from blocks_with_dropout import BATCH, TOKENS, Model
from torch import nn

import tightfit
from exactness import assert_bit_equal, run
from tightfit.levers.captured.lever import CapturedForward
from tightfit.levers.recompute import RECOMPUTE_ALL
from tiny import Stack, allocator_peak

pytestmark = pytest.mark.keeps("captured-blocks-take-predicted")


@pytest.fixture(scope="module")
def batch():
    return {"ids": torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 32}


def build() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    model.layers = model.layers[:2]
    return model


def loss(model, batch):
    return model(batch["ids"])


def captured(model):
    return tightfit.capture(model, "layers.*", policy=RECOMPUTE_ALL)


def train(model, batch, steps=3):
    """The record of a monitored training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tightfit.monitor(model, optimizer) as watch:
        for _ in range(steps):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.record()


def test_the_steps_that_the_monitor_observes_run_the_programs_in_the_predicted_bytes(batch):
    beside, model = build(), build()
    torch.manual_seed(0)
    train(beside, batch)
    with captured(model):
        predicted = tightfit.estimate(model, batch, loss=loss, optimizer="sgd").peak_bytes
        torch.manual_seed(0)
        assert train(model, batch).peak_bytes == predicted
        forwards = [vars(layer)["forward"] for layer in model.layers]
        assert all(isinstance(forward, CapturedForward) for forward in forwards)
        assert not any(forward.refused or forward._recorded for forward in forwards)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), beside.parameters(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_mode_that_may_change_results_gets_the_operators_of_the_recorder(batch):
    class Doubled(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.gelu.default else out

    beside, model = build(), build()
    with Doubled():
        torch.manual_seed(0)
        wanted = loss(beside, batch)
        torch.manual_seed(0)
        with captured(model):
            assert torch.equal(loss(model, batch), wanted)


class Counted(nn.Module):
    """A block that writes its buffers."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x + self.norm(torch.tanh(self.linear(x)))


def squares(model, batch):
    return model(batch["x"]).square().sum()


def test_a_dry_run_of_blocks_that_write_buffers_predicts_the_bytes_and_changes_no_buffer():
    torch.manual_seed(0)
    model, inputs = Stack(Counted(), Counted()), {"x": torch.randn(64, 8)}
    plain = run(copy.deepcopy(model), inputs, squares)
    with tightfit.capture(model, "layers.*"):
        before = copy.deepcopy(model.state_dict())
        predicted = tightfit.estimate(model, inputs, loss=squares).peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
        assert predicted == allocator_peak(copy.deepcopy(model), inputs, loss=squares)
    assert_bit_equal(plain, run(model, inputs, squares, levers=lambda model: tightfit.capture(model, "layers.*")))


def test_a_dry_run_captures_although_the_user_has_switched_compiled_code_off(batch):
    model = build()
    with captured(model):
        predicted = tightfit.estimate(model, batch, loss=loss).peak_bytes
        with torch.compiler.set_stance("force_eager"):
            assert tightfit.estimate(model, batch, loss=loss).peak_bytes == predicted


@torch._dynamo.config.patch(disable=True)
def test_without_pytorchs_compiler_blocks_run_by_the_recorder_and_say_so_once():
    class Alone(Counted):
        pass

    torch.manual_seed(0)
    model, inputs = Stack(Alone(), Alone()), {"x": torch.randn(4, 8)}
    plain = run(copy.deepcopy(model), inputs, squares)
    with captured(model):
        assert tightfit.estimate(model, inputs, loss=squares).peak_bytes > 0
    with pytest.warns(UserWarning, match="blocks of Alone run without being captured: .*switched off") as said:
        assert_bit_equal(plain, run(model, inputs, squares, levers=captured))
    assert len(said) == 1
