"""Models that are spread over processes: refused in one line, and what the line says to do instead works."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from round_device import round_device
from tightfit import estimate, monitor, plan, verify
from tightfit.errors import ModelError
from tiny import decoder, token_batch

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def gradients(model):
    model(**token_batch()).loss.backward()
    return [whole(parameter.grad) for parameter in model.parameters()]


@pytest.fixture
def made():
    return plan(decoder(), token_batch(), "0.7x", device=round_device())


@pytest.mark.keeps("plan-process-gives-same")
def test_a_model_in_ddp_is_refused_and_stays_usable(one_process, made):
    model = nn.parallel.DistributedDataParallel(decoder())
    for ask in (
        lambda: estimate(model, token_batch()),
        lambda: plan(model, token_batch(), "0.7x"),
        lambda: verify(model, token_batch(), made),
        lambda: made.apply(model),
    ):
        with pytest.raises(ModelError, match=r"does not support DistributedDataParallel yet: .*model\.module"):
            ask()
    expected = gradients(decoder())
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), expected, strict=True))


def test_a_sharded_model_is_refused_and_stays_usable(one_process, made):
    model = sharded(decoder())
    for ask in (
        lambda: estimate(model, token_batch()),
        lambda: plan(model, token_batch(), "0.7x"),
        lambda: verify(model, token_batch(), made),
        lambda: monitor(model),
    ):
        with pytest.raises(ModelError, match=r"does not support parameters that are DTensors yet \(.*before it is"):
            ask()
    expected = gradients(decoder())
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), expected, strict=True))


@pytest.mark.keeps("plan-process-gives-same")
def test_a_plan_for_one_process_works_in_ddp_and_sharded(one_process, made):
    model = decoder()
    expected = gradients(copy.deepcopy(model))
    for wrap, applied_first in (
        (nn.parallel.DistributedDataParallel, True),
        (nn.parallel.DistributedDataParallel, False),
        (sharded, True),
        (sharded, False),
    ):
        inner = copy.deepcopy(model)
        if applied_first:
            made.apply(inner)
        wrapped = wrap(inner)
        if not applied_first:
            made.apply(inner)
        assert all(torch.equal(one, other) for one, other in zip(gradients(wrapped), expected, strict=True))
