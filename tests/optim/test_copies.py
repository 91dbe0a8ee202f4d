"""An optimizer that is copied or pickled together with its model goes on as the original does."""

import copy
import pickle

import pytest
import torch
from small_training import assert_same_weights, batches, grouped, loss_of, net, train

from tightfit.errors import InputError
from tightfit.optim import BF16AdamW, FlashAdamW, Muon8bit, MuonWithAdamW, OffloadedAdamW, step_in_backward
from tightfit.optim.host_gradient import HostGradient

BF16 = torch.bfloat16
KINDS = {
    "states on the host": (lambda model: OffloadedAdamW(grouped(model), 1e-2), torch.float32),
    "some states on the host": (lambda model: OffloadedAdamW(model.parameters(), fraction=0.4), torch.float32),
    "states of 16-bit weights on the host": (lambda model: OffloadedAdamW(model.parameters()), BF16),
    "remainder": (lambda model: BF16AdamW(model.parameters(), 1e-2), BF16),
    "rounded by chance": (lambda model: BF16AdamW(grouped(model), keeping="stochastic", seed=4), BF16),
    "24 bits": (lambda model: FlashAdamW(grouped(model), 1e-2), BF16),
    "muon": (lambda model: MuonWithAdamW(grouped(model), 1e-2, momentum=0.9), torch.float32),
    "muon, 24 bits": (lambda model: Muon8bit(grouped(model), 1e-2, momentum=0.9), BF16),
}


def pickled(item):
    return pickle.loads(pickle.dumps(item))


@pytest.mark.keeps("tightfit-optimizer-copied-pickled")
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize(("build", "dtype"), KINDS.values(), ids=KINDS)
def test_a_copy_trains_on_bit_for_bit(build, dtype, copied):
    model = net(dtype)
    optimizer = build(model)
    train(model, optimizer, steps=3)
    other, its_optimizer = copied((model, optimizer))
    train(model, optimizer, steps=3, seed=1)
    train(other, its_optimizer, steps=3, seed=1)
    assert_same_weights(model, other)
    twin = its_optimizer.twin()
    assert not twin.state
    assert twin.own_settings() == its_optimizer.own_settings() == optimizer.own_settings()


@pytest.mark.keeps("tightfit-optimizer-copied-pickled")
def test_a_copy_has_the_same_states_on_the_host_and_takes_its_own_gradients_only():
    model = net()
    optimizer = OffloadedAdamW(model.first.parameters(), fraction=0.5)
    optimizer.add_param_group({"params": list(model.second.parameters())})
    other, its_optimizer = copy.deepcopy((model, optimizer))
    loss_of(other, torch.ones(2, 3, dtype=torch.long)).backward()
    names = [
        [n for n, p in m.named_parameters() if p in set(o.choice())]
        for m, o in ((model, optimizer), (other, its_optimizer))
    ]
    assert names[0] == names[1] == ["first.weight", "second.weight"]
    assert {n for n, p in other.named_parameters() if isinstance(p.grad, HostGradient)} == set(names[0])
    assert all(p.grad is None for p in model.parameters())


def test_a_copy_steps_when_it_is_told_to_not_in_backward():
    model = net()
    optimizer = OffloadedAdamW(model.parameters())
    step_in_backward(optimizer, model)
    other, its_optimizer = copy.deepcopy((model, optimizer))
    plain = net()
    train(plain, torch.optim.AdamW(plain.parameters()), steps=2)
    train(other, its_optimizer, steps=2)
    assert_same_weights(other, plain)


@pytest.mark.parametrize(("build", "dtype"), KINDS.values(), ids=KINDS)
def test_a_step_with_a_closure_computes_the_loss_first(build, dtype):
    model, told = net(dtype), net(dtype)
    optimizer, closing = build(model), build(told)
    for ids in batches(3):
        losses = []
        for each in (model, told):
            each.zero_grad()
            losses.append(loss_of(each, ids))
        losses[0].backward()
        optimizer.step()

        def closure(loss=losses[1]):
            loss.backward()
            return loss

        assert torch.equal(closing.step(closure), losses[0])
    assert_same_weights(model, told)


def test_muon_refuses_a_state_that_does_not_fit():
    model = net()
    optimizer = MuonWithAdamW(grouped(model))
    train(model, optimizer, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["momentum_buffer"] = torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"momentum_buffer of parameter 0 has shape \(2, 2\)"):
        MuonWithAdamW(grouped(net())).load_state_dict(saved)


@pytest.mark.slow  # dynamo takes seconds to load
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.parametrize(("build", "dtype"), KINDS.values(), ids=KINDS)
def test_a_step_that_the_user_compiles_updates_as_it_is_written(build, dtype):
    plain, other = net(dtype), net(dtype)
    for model, compiled in ((plain, False), (other, True)):
        optimizer = build(model)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for ids in batches(4):
            optimizer.zero_grad()
            loss_of(model, ids).backward()
            step()
    assert_same_weights(plain, other)
