"""Trained weights that are streamed: bit-equal, as large as predicted, and refused where nothing updates them there."""

import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import tightfit
from exactness import assert_bit_equal, run
from tightfit.errors import CannotFit
from tightfit.memory.allocator import measured_peak
from tightfit.optim import OffloadedAdamW
from tightfit.optim.link import is_streamed
from tightfit.planner.levers import Stream
from tightfit.training.loop import resident_tensors
from trained_blocks import BLOCKS, built, loss, of_batch

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw fused": partial(torch.optim.AdamW, fused=True),  # its writes are not counted
    "sgd fused": partial(torch.optim.SGD, lr=0.1, fused=True),
    "offloaded_adamw": OffloadedAdamW,
    "offloaded_adamw_fused": partial(OffloadedAdamW, fused=True),
}


def trained(kind, dtype, *, stream, steps=4, parts=2, clip=0.5, **how):
    """Losses and weights of a few steps of two micro-batches, clipped, and the optimizer's states."""
    model, x = built(dtype)
    handle = tightfit.stream(model, "layers.*", trained=True, **how) if stream else None
    optimizer = OPTIMIZERS[kind](model.parameters())
    losses = []
    for _ in range(steps):
        for _ in range(parts):
            losses.append(loss(model, x))
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict()["state"])
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if handle is not None:
        handle.undo()
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    return [each.detach() for each in losses], weights, state


@pytest.mark.sampled(4)
@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_bit_equal(kind, dtype):
    plain, streamed = (trained(kind, dtype, stream=stream) for stream in (False, True))
    for left, right in zip(plain, streamed, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.keeps("streamed-trained-bits")
def test_everything_of_a_step_is_bit_equal():
    def levers(model):
        return tightfit.stream(model, "layers.*", trained=True)

    def made():
        model, x = built()
        return model, x.requires_grad_()

    assert_bit_equal(run(*made(), loss, times=3), run(*made(), loss, times=3, levers=levers))


def test_weights_that_are_written_and_loaded_between_steps_are_those_that_train_on():
    model, x = built()
    other = built(torch.float32)[0]
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    with tightfit.stream(model, "layers.*", trained=True):
        optimizer = OffloadedAdamW(model.parameters())
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(other.state_dict())
        torch.manual_seed(1)
        streamed = loss(model, x)
    torch.manual_seed(1)
    assert torch.equal(streamed, loss(other, x))


def test_nothing_stays_in_pytorch_when_the_levers_are_gone():
    model, x = built()
    gc.collect()  # earlier ones
    before, after = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    handle = tightfit.stream(model, "layers.*", trained=True)
    assert len(_global_optimizer_pre_hooks) == before + 1
    loss(model, x).backward()
    twin = copy.deepcopy(model)
    assert len(_global_optimizer_pre_hooks) == before + 2, "an optimizer of the copy is refused like the other"
    del twin
    handle.remove()
    tightfit.plan(model, {"x": x}, "1GiB", loss=of_batch, device="cpu", levers=["exact", "stream"])
    del handle
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
    assert len(_global_optimizer_post_hooks) == after
    assert not any(is_streamed(weight) for weight in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.keeps("streamed-peak")
@pytest.mark.parametrize("kind", ["adamw", "offloaded_adamw"])
@pytest.mark.parametrize("share", [0.95, 0.93])
def test_a_plan_has_the_predicted_peak_and_changes_no_bit(kind, share):
    how = {"loss": of_batch, "device": "cpu", "optimizer": kind}
    model, x = built()
    batch = {"x": x.repeat(8, 1, 1)}  # the peak is in backward
    plain = tightfit.estimate(model, batch, **how).peak_bytes
    plan = tightfit.plan(model, batch, int(share * plain), levers=["stream"], **how)
    lever = plan.lever(Stream)
    assert lever.trained
    assert "of weights from the host" in lever.sentence(plan.choices)
    again = tightfit.Plan.from_dict(plan.to_dict())
    assert again == plan
    with again.apply(model) as applied:
        optimizer = OPTIMIZERS[kind](model.parameters())

        def step():
            applied.backward(batch, of_batch)
            optimizer.step()
            optimizer.zero_grad()

        step(), step()
        assert measured_peak(step, resident_tensors(model, optimizer, batch)) == plan.peak_bytes <= plan.budget_bytes
    assert tightfit.verify(built()[0], batch, plan, loss=of_batch).ok


def test_a_card_streams_trained_weights_only_where_the_host_updates_them():
    model, x = built()
    how = {"loss": of_batch, "device": "rtx4090", "levers": ["exact", "stream"]}
    plain = tightfit.plan(model, {"x": x}, "1GiB", **how, optimizer="adamw")
    assert plain.lever(Stream) is None
    with pytest.raises(CannotFit):
        tightfit.plan(model, {"x": x}, "1MiB", **how, optimizer="adamw")


@pytest.mark.keeps("host-peak-is-predicted")
def test_weights_and_states_are_in_the_hosts_memory():
    model, x = built(torch.bfloat16)
    how = {"loss": of_batch, "device": "rtx4090", "optimizer": "offloaded_adamw"}
    plain = tightfit.estimate(model, {"x": x}, **how)
    with tightfit.stream(model, "layers.*", trained=True):
        found = tightfit.estimate(model, {"x": x}, **how)
    blocks = [p for p in model["layers"].parameters() if p.nbytes >= 512]
    there = sum(p.nbytes for p in blocks)
    assert found.by_category["parameters"] <= plain.by_category["parameters"] - there + 3 * there // BLOCKS
    assert found.host_by_category["parameters"] == sum(-(-p.nbytes // 4096) * 4096 for p in blocks)
    assert found.host_by_category["gradients"] == plain.host_by_category["gradients"]
    assert found.host_by_category["optimizer states"] <= plain.host_by_category["optimizer states"]
