"""AdamW with its states on the host is AdamW."""

import copy
import gc
import math

import pytest
import torch
from small_training import (
    assert_same_weights,
    batches,
    clip,
    grouped,
    loss_of,
    net,
    resumed_equals_uninterrupted,
    train,
)
from torch import nn

from tightfit.errors import InputError
from tightfit.optim import BF16AdamW, OffloadedAdamW
from tightfit.optim.host_gradient import HostGradient
from tightfit.optim.link import Link


def both(fraction=1.0, **settings):
    plain, frugal = net(), net()
    return (plain, torch.optim.AdamW(grouped(plain), lr=1e-2, **settings)), (
        frugal,
        OffloadedAdamW(grouped(frugal), lr=1e-2, fraction=fraction, **settings),
    )


@pytest.mark.keeps("adamw-states-host-equals")
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_fifty_steps_with_scheduler_clipping_and_accumulation_are_bit_equal(fraction):
    (plain, reference), (frugal, offloaded) = both(fraction)
    norms = []
    for model, optimizer in ((plain, reference), (frugal, offloaded)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60)
        norms.append(train(model, optimizer, micro_batches=2, clipping=clip, scheduler=scheduler))
    assert [float(norm) for norm in norms[0]] == [float(norm) for norm in norms[1]]
    assert max(norms[0]) > 0.5, "the clipping did something"
    assert_same_weights(plain, frugal)


@pytest.mark.keeps("adamw-states-host-equals")
def test_a_gradient_scaler_skips_the_same_steps_and_the_weights_are_bit_equal():
    (plain, reference), (frugal, offloaded) = both()
    scales = []
    for model, optimizer in ((plain, reference), (frugal, offloaded)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
        train(model, optimizer, scaler=scaler, steps=40, clipping=clip)
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] < 2.0**127, "steps were skipped"
    assert_same_weights(plain, frugal)


def test_the_fused_kernel_on_the_host_is_that_of_fused_adamw():
    plain, frugal = net(), net()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True))
    train(frugal, OffloadedAdamW(frugal.parameters(), fused=True))
    assert_same_weights(plain, frugal)


def test_sixteen_bit_weights_are_those_of_an_fp32_master_with_the_same_gradients():
    for fraction in (0.0, 1.0):
        model, master = net(torch.bfloat16), net().to(torch.bfloat16).float()
        optimizer, reference = (
            OffloadedAdamW(model.parameters(), fraction=fraction),
            torch.optim.AdamW(master.parameters()),
        )
        for ids in batches(20):
            loss_of(model, ids).backward()
            for own, theirs in zip(model.parameters(), master.parameters(), strict=True):
                theirs.grad = None if own.grad is None else own.grad.cpu().float().clone()
            optimizer.step(), reference.step(), optimizer.zero_grad()
        assert_same_weights(model, master)


def test_gradients_leave_the_device_when_backward_has_made_them_and_read_as_gradients():
    plain, frugal = net(), net()
    optimizer = OffloadedAdamW(frugal.parameters())
    for model in (plain, frugal):
        loss_of(model, torch.ones(2, 3, dtype=torch.long)).backward()
    for own, theirs in zip(frugal.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert isinstance(own.grad, HostGradient)
            assert torch.equal(own.grad.clone(), theirs.grad)
            own.grad.data.mul_(2)
            assert torch.equal(own.grad + 0, theirs.grad * 2)
    assert "HostGradient" in repr(frugal.first.weight.grad)
    optimizer.zero_grad(set_to_none=False)
    assert not frugal.first.weight.grad.abs().sum()


def test_parts_of_the_states_stay_on_the_device():
    model = net()
    whole = sum(p.numel() for p in model.parameters())
    on_host = [
        sum(p.numel() for p in OffloadedAdamW(model.parameters(), fraction=share).choice()) for share in (0.0, 0.5, 1.0)
    ]
    assert 0 == on_host[0] < whole / 2 <= on_host[1] < on_host[2] == whole


def test_a_resumed_training_is_bit_equal():
    for fraction in (0.4, 1.0):
        resumed_equals_uninterrupted(lambda model, share=fraction: OffloadedAdamW(grouped(model), fraction=share))
        resumed_equals_uninterrupted(
            lambda model, share=fraction: OffloadedAdamW(model.parameters(), fraction=share),
            lambda: net(torch.bfloat16),
        )


def test_it_goes_on_where_a_plain_adamw_stopped_and_the_other_way_round():
    plain, frugal = net(), net()
    reference, offloaded = torch.optim.AdamW(plain.parameters()), OffloadedAdamW(frugal.parameters())
    train(plain, reference, steps=5)
    frugal.load_state_dict(plain.state_dict())
    offloaded.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(plain, reference, steps=5, seed=1)
    train(frugal, offloaded, steps=5, seed=1)
    assert_same_weights(plain, frugal)


def test_weights_that_are_loaded_between_steps_are_the_ones_that_train_on():
    (plain, reference), (frugal, offloaded) = both()
    other = {name: value + 1 for name, value in net().state_dict().items()}
    for model, optimizer in ((plain, reference), (frugal, offloaded)):
        train(model, optimizer, steps=3)
        model.load_state_dict(other)
        train(model, optimizer, steps=3)
    assert_same_weights(plain, frugal)


@pytest.mark.keeps("optimizer-name-resumes-bit")
def test_a_state_that_does_not_fit_is_refused_whole():
    model = net()
    optimizer = OffloadedAdamW(grouped(model))
    train(model, optimizer, steps=1)
    saved = optimizer.state_dict()
    with pytest.raises(InputError, match="has 2 parameter groups, this optimizer has 1"):
        OffloadedAdamW(model.parameters()).load_state_dict(saved)
    short = copy.deepcopy(saved)
    short["param_groups"][1]["params"].pop()
    with pytest.raises(InputError, match="group 1 of the saved state has"):
        optimizer.load_state_dict(short)
    odd = copy.deepcopy(saved)
    odd["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"exp_avg of parameter 0 has shape \(2, 2\), the parameter \(31, 13\)"):
        optimizer.load_state_dict(odd)


def test_a_group_that_is_added_later_is_offloaded_too():
    plain, frugal = net(), net()
    reference = torch.optim.AdamW(plain.first.parameters())
    offloaded = OffloadedAdamW(frugal.first.parameters())
    for model, optimizer in ((plain, reference), (frugal, offloaded)):
        train(model, optimizer, steps=2)
        optimizer.zero_grad()
        model.zero_grad()
        optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 1e-2})
        train(model, optimizer, steps=4)
    assert len(offloaded.choice()) == sum(len(group["params"]) for group in offloaded.param_groups)
    assert_same_weights(plain, frugal)


@pytest.mark.parametrize("kind", [OffloadedAdamW, BF16AdamW])
def test_settings_by_their_place_are_those_of_adamw(kind):
    settings = (1e-2, (0.8, 0.9), 1e-6, 0.3)
    theirs, ours = torch.optim.AdamW(net().parameters(), *settings), kind(net().parameters(), *settings)
    for name in ("lr", "betas", "eps", "weight_decay"):
        assert ours.param_groups[0][name] == theirs.param_groups[0][name]


def test_settings_out_of_range_are_refused():
    parameters = [nn.Parameter(torch.zeros(2))]
    for settings, line in (
        ({"fraction": 1.5}, "fraction is 1.5: the share of the states on the host goes from 0 to 1"),
        ({"lr": -1.0}, "lr is -1.0: it must be zero or more"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
    ):
        with pytest.raises(InputError, match=line):
            OffloadedAdamW(parameters, **settings)


def test_a_dropped_optimizer_leaves_nothing_on_the_model():
    model = net()
    optimizer = OffloadedAdamW(model.parameters())
    del optimizer
    gc.collect()
    loss_of(model, batches(1)[0]).backward()
    assert not any(isinstance(p.grad, HostGradient) for p in model.parameters())


class LateCopy:
    """A copy that has not happened before somebody waits for it."""

    def __init__(self, target, source):
        self.target, self.source = target, source

    def synchronize(self):
        if self.target is not None:
            self.target.copy_(self.source)
        self.target = None


class LateLink(Link):
    """A link on which every copy arrives as late as it may: who does not wait reads NaN."""

    is_concurrent = True

    def __init__(self, device):
        super().__init__(device)
        self.arriving, self.leaving = {}, []

    def to_host(self, tensor, target=None):
        assert target is None, "of a weight in a file"
        target = self.empty_on_host(tensor).fill_(math.nan)
        self.arriving[target.data_ptr()] = LateCopy(target, tensor.clone())
        return target

    def wait(self, tensor):
        copy = self.arriving.pop(tensor.data_ptr(), None)
        if copy is not None:
            copy.synchronize()

    def to_device(self, target, source):
        copy = LateCopy(target.detach().fill_(math.nan), source)
        self.leaving.append(copy)
        return copy

    def join(self):
        for late in self.leaving:
            late.synchronize()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_it_waits_for_every_copy(micro_batches, monkeypatch):
    monkeypatch.setattr("tightfit.optim.offloaded.Link", LateLink)
    (plain, reference), (frugal, offloaded) = both()
    for model, optimizer in ((plain, reference), (frugal, offloaded)):
        train(model, optimizer, micro_batches=micro_batches, clipping=clip, scaler=torch.amp.GradScaler("cpu"))
    assert_same_weights(plain, frugal)
