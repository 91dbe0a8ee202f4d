"""`undo()` whatever has happened to the model since, and plans asked for in the wrong order."""

import copy
import gc
import pickle

import pytest
import torch

import tightfit
from round_device import round_device
from tightfit.errors import LeverError
from tightfit.step import model_loss
from tiny import decoder, token_batch

BATCH = token_batch(2, 48)
SIZES = {"num_layers": 3, "hidden_size": 32}


def asked(model, budget="0.8x"):
    return tightfit.plan(model, BATCH, budget, device=round_device())


@pytest.fixture(scope="module")
def plan():
    return asked(decoder(**SIZES))


@pytest.fixture
def model():
    return decoder(**SIZES)


def patched(model):
    return [path for path, module in model.named_modules() if "forward" in module.__dict__]


def gradients(model):
    model.zero_grad()
    model_loss(model, BATCH).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def shortened(model):
    model.layers = model.layers[:2]


def emptied(model):
    while len(model.layers):
        del model.layers[0]
    gc.collect()


def replaced(model):
    model.layers[0] = decoder(**SIZES).layers[0]
    gc.collect()


def copied(model):
    model.layers[0] = copy.deepcopy(model.layers[0])


def reordered(model):
    model.layers = torch.nn.ModuleList(reversed(model.layers))


def shared(model):
    model.layers[2] = model.layers[0]


def patched_anew(model):
    model.layers[0].forward = type(model.layers[0]).forward.__get__(model.layers[0])
    del model.layers[0].forward


@pytest.mark.slow  # two plans
@pytest.mark.keeps("undo-removes-lever-still")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    [shortened, emptied, replaced, copied, reordered, shared, patched_anew],
    ids=lambda change: change.__name__,
)
def test_undo_takes_off_what_still_stands(change, plan, model):
    applied = plan.apply(model)
    change(model)
    applied.undo()
    assert patched(model) == []
    assert not applied.in_force
    applied.undo()
    if model.layers:
        gradients(model)
        assert asked(model).peak_bytes > 0


def test_a_block_that_has_moved_to_another_model_is_restored_there(plan, model):
    other = decoder(**SIZES)
    applied = plan.apply(model)
    other.layers[0] = model.layers[0]
    applied.undo()
    assert patched(model) == patched(other) == []


def test_a_model_that_is_gone_needs_no_undo(model):
    applied = tightfit.recompute(model, "layers.*")
    held = [model]
    del model
    held.clear()
    gc.collect()
    applied.undo()
    assert not applied.in_force


def by_hand(plan, model):
    return tightfit.recompute(model, "layers.*")


def by_plan(plan, model):
    return plan.apply(model)


@pytest.mark.parametrize("apply", [by_hand, by_plan], ids=lambda apply: apply.__name__)
def test_undo_that_was_interrupted_goes_on_where_it_stood(apply, plan, model, monkeypatch):
    applied = apply(plan, model)
    block = type(model.layers[0].forward)
    remove = block.remove
    calls = []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 2:
            raise KeyboardInterrupt
        remove(self)

    monkeypatch.setattr(block, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        applied.undo()
    assert patched(model)
    applied.undo()
    assert patched(model) == []


def test_a_forward_that_the_user_put_around_ours_stays_and_runs_the_plain_block(plan, model):
    applied = plan.apply(model)
    inner, calls = model.layers[0].forward, []

    def mine(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    model.layers[0].forward = mine
    applied.undo()
    assert patched(model) == ["layers.0"]
    plain = gradients(decoder(**SIZES))
    assert all(map(torch.equal, gradients(model), plain))
    assert calls
    assert inner.steps_aside
    del model.layers[0].forward
    assert asked(model).peak_bytes > 0


def test_undo_between_forward_and_backward(plan, model):
    applied = plan.apply(model)
    loss = model_loss(model, BATCH)
    applied.undo()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found, gradients(decoder(**SIZES))))


def test_undo_inside_a_forward(plan, model):
    applied = plan.apply(model)
    model.layers[1].register_forward_pre_hook(lambda *_: applied.undo())
    assert all(map(torch.equal, gradients(model), gradients(decoder(**SIZES))))
    assert patched(model) == []


@pytest.mark.parametrize(
    "kind", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_applied_model_is_freed_by_its_own_undo(kind, plan, model):
    applied = plan.apply(model)
    twin = kind(model)
    applied.undo()
    assert patched(model) == []
    assert patched(twin)
    assert all(map(torch.equal, gradients(twin), gradients(model)))
    for ask in (asked, plan.apply, lambda twin: tightfit.verify(twin, BATCH, plan)):
        with pytest.raises(LeverError, match=r"layers\.0 is already recomputed.*tightfit\.undo\(model\)"):
            ask(twin)
    tightfit.undo(twin)
    tightfit.undo(twin)
    assert patched(twin) == []
    assert tightfit.verify(twin, BATCH, plan).ok


def test_a_plan_applied_twice_is_refused_and_changes_nothing(plan, model):
    applied = plan.apply(model)
    before = patched(model)
    for ask in (asked, plan.apply, lambda model: tightfit.verify(model, BATCH, plan)):
        with pytest.raises(LeverError, match="undo that first"):
            ask(model)
    assert patched(model) == before
    applied.undo()
    with plan.apply(model), pytest.raises(LeverError):
        plan.apply(model)
    assert patched(model) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode], ids=lambda around: around.__name__)
def test_a_plan_asked_for_where_gradients_are_off_is_the_same_plan(around, plan, model):
    with around():
        found = asked(model)
        assert tightfit.verify(model, BATCH, found).ok
        assert not torch.is_grad_enabled()
    assert (found.peak_bytes, found.plain_peak_bytes) == (plan.peak_bytes, plan.plain_peak_bytes)
    assert found.choices == plan.choices
