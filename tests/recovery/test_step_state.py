"""What a step changes in a model beside gradients and weights is put back; what is not is refused by name."""

import random
import weakref

import numpy
import pytest
import torch
from torch import nn

from tightfit.errors import RecoveryError
from tightfit.training.recovery import step_state
from tightfit.training.recovery.step_state import OBSERVED, StepState


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("seldom", torch.zeros(3))
        self.register_buffer("always", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("never", torch.arange(4.0))
        self.plain = torch.zeros(2)
        self.cache = []
        self.counts = {"steps": 0}
        self.own = numpy.random.default_rng(0)

    def forward(self, *, seldom=False):
        self.always += 1
        self.plain.add_(1)
        self.cache.append(float(torch.rand(())) + random.random() + numpy.random.rand() + self.own.random())
        self.counts["steps"] += 1
        if seldom:
            self.seldom += 1


def seen(model):
    tensors = [t.clone() for t in (model.seldom, model.always, model.never, model.plain)]
    return tensors, list(model.cache), dict(model.counts)


def assert_same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1:] == other[1:]


@pytest.mark.parametrize("steps_before", [0, 1, OBSERVED, 5])
def test_a_step_is_undone_and_run_again_with_the_same_random_numbers(steps_before):
    model = Model()
    state = StepState(model)
    for _ in range(steps_before):
        state.remember()
        model()
        state.settle()
    before = seen(model)
    state.remember()
    model()
    after = seen(model)
    state.put_back()
    assert_same(seen(model), before)
    model()
    assert_same(seen(model), after)


def test_only_what_moves_is_copied_once_it_is_known():
    model = Model()
    state = StepState(model)
    for _ in range(OBSERVED):
        state.remember()
        model()
        state.settle()
    state.remember()
    assert {held.path for held in state._tensors if held.copy is not None} == {"always", "plain"}
    state.settle()
    assert all(held.copy is None for held in state._tensors), "let go after backward"


def test_a_running_statistic_is_put_back_though_its_kernel_counts_no_write():
    norm = nn.BatchNorm1d(3)
    state = StepState(norm)
    state.remember()
    version = norm.running_mean._version
    norm(torch.randn(5, 3))
    assert norm.running_mean._version == version
    state.put_back()
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert norm.num_batches_tracked == 0


def test_what_begins_to_move_later_is_refused_once_and_then_watched():
    model = Model()
    state = StepState(model)
    for _ in range(OBSERVED):
        state.remember()
        model()
        state.settle()
    state.remember()
    model(seldom=True)
    with pytest.raises(RecoveryError, match="it wrote into seldom") as raised:
        state.put_back()
    assert "\n" not in str(raised.value)
    state.settle()
    before = seen(model)
    state.remember()
    model(seldom=True)
    state.put_back()
    assert_same(seen(model), before)


def test_a_tensor_that_is_too_large_to_copy_is_refused_by_name_if_it_moves(monkeypatch):
    monkeypatch.setattr(step_state, "LARGEST", 8)
    model = Model()
    state = StepState(model)
    state.remember()
    model(seldom=True)
    with pytest.raises(RecoveryError, match="seldom"):
        state.put_back()


def test_an_attribute_that_is_replaced_is_not_held():
    model = Model()
    model.last = torch.zeros(1000)
    reference = weakref.ref(model.last)
    state = StepState(model)
    for _ in range(OBSERVED + 1):
        state.remember()
        model.last = torch.zeros(1000)
        state.settle()
    assert reference() is None


def test_objects_are_left_alone_on_request():
    """A guest's trainer may be an attribute of its module."""

    class Trainer:
        step = 0

    for in_objects, wanted in ((True, 0), (False, 1)):
        model = Model()
        model.trainer = Trainer()
        model.trainer.step = 0
        state = StepState(model, in_objects=in_objects)
        state.remember()
        model.trainer.step = 1
        state.put_back()
        assert model.trainer.step == wanted
