"""A step inside backward is the step after it, with each gradient gone at once."""

import pytest
import torch
from small_training import assert_same_weights, batches, clip, loss_of, net, train

from exactness import allocator_record
from tightfit.errors import InputError, LeverError
from tightfit.optim import BF16AdamW, Muon8bit, MuonWithAdamW, OffloadedAdamW, step_in_backward

KINDS = {
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "muon": MuonWithAdamW,
    "muon8bit": Muon8bit,
    "offloaded": OffloadedAdamW,
}


@pytest.mark.keeps("step-inside-backward-equals")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_states_are_those_of_stepping_afterwards(kind):
    plain, frugal = net(), net()
    reference = KINDS[kind](plain.parameters())
    handle = step_in_backward(KINDS[kind], frugal)
    for model, optimizer in ((plain, reference), (frugal, handle.optimizer)):
        train(model, optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50))
    assert_same_weights(plain, frugal)
    for one, other in zip(plain.parameters(), frugal.parameters(), strict=True):
        mine, theirs = reference.state[one], handle.optimizer.state[other]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine if isinstance(mine[key], torch.Tensor))


@pytest.mark.parametrize("keeping", ["remainder", "stochastic"])
def test_sixteen_bit_weights_too(keeping):
    plain, frugal = net(torch.bfloat16), net(torch.bfloat16)
    reference = BF16AdamW(plain.parameters(), keeping=keeping)
    train(plain, reference)
    train(frugal, step_in_backward(BF16AdamW(frugal.parameters(), keeping=keeping), frugal).optimizer)
    assert_same_weights(plain, frugal)


def test_micro_batches_accumulate_where_the_loop_says_so():
    plain, frugal = net(), net()
    reference = torch.optim.AdamW(plain.parameters())
    handle = step_in_backward(torch.optim.AdamW(frugal.parameters()), frugal)
    train(plain, reference, micro_batches=2)
    for ids in batches(50):
        first, last = ids.chunk(2)
        with handle.accumulate():
            loss_of(frugal, first).backward()
        loss_of(frugal, last).backward()
        handle.optimizer.step()
        handle.optimizer.zero_grad()
    assert_same_weights(plain, frugal)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "fused", "offloaded"])
def test_a_step_whose_closure_runs_backward_computes_the_same(kind, by_name):
    plain, frugal = net(), net()
    reference = KINDS[kind](plain.parameters())
    optimizer = step_in_backward(KINDS[kind], frugal).optimizer
    for model, stepped in ((plain, reference), (frugal, optimizer)):
        for ids in batches(5):

            def closure(model=model, stepped=stepped, ids=ids):
                stepped.zero_grad()
                loss = loss_of(model, ids)
                loss.backward()
                return loss

            assert (stepped.step(closure=closure) if by_name else stepped.step(closure)) is not None
    assert_same_weights(plain, frugal)


@pytest.mark.keeps("step-inside-backward-equals")
def test_a_second_backward_that_was_not_announced_is_refused():
    model = net()
    handle = step_in_backward(torch.optim.AdamW(model.parameters()), model)
    loss_of(model, torch.ones(2, 3, dtype=torch.long)).backward()
    with pytest.raises(LeverError, match=r"a second backward before optimizer.step\(\)"):
        loss_of(model, torch.ones(2, 3, dtype=torch.long)).backward()
    handle.undo()


@pytest.mark.keeps("step-inside-backward-equals")
def test_clipping_is_refused():
    model = net()
    handle = step_in_backward(torch.optim.AdamW, model)
    with pytest.raises(LeverError, match="gradient clipping and gradient scalers need all gradients at once"):
        train(model, handle.optimizer, clipping=clip, steps=1)


@pytest.mark.keeps("step-inside-backward-equals")
def test_a_gradient_scaler_is_refused():
    model = net()
    handle = step_in_backward(torch.optim.AdamW, model)
    with pytest.raises(LeverError, match="gradient clipping and gradient scalers need all gradients at once"):
        train(model, handle.optimizer, scaler=torch.amp.GradScaler("cpu"), steps=1)


def test_undo_gives_back_an_ordinary_step_with_the_states_kept():
    plain, frugal = net(), net()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, steps=3)
    train(plain, reference, steps=3, clipping=clip, seed=1)
    with step_in_backward(torch.optim.AdamW, frugal) as handle:
        train(frugal, handle.optimizer, steps=3)
    train(frugal, handle.optimizer, steps=3, clipping=clip, seed=1)
    assert_same_weights(plain, frugal)


def test_gradients_never_exist_all_at_once():
    def rise(in_backward):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if in_backward:
            step_in_backward(optimizer, model)
        return allocator_record(lambda: model(torch.ones(1, 64)).sum().backward())[0]

    assert rise(True) < 4 * 64 * 64 * 4 < 12 * 64 * 64 * 4 < rise(False)


def test_what_cannot_be_stepped_is_refused():
    model = net()
    with pytest.raises(InputError, match="the optimizer holds no parameter of the model"):
        step_in_backward(torch.optim.AdamW(net().parameters()), model)
    with pytest.raises(InputError, match="LBFGS needs all gradients together"):
        step_in_backward(torch.optim.LBFGS, model)
