"""Operators that autograd decomposes reach a dry run whole in inference mode, and inside of a tensor's own class."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import tightfit
from round_device import round_device
from tightfit.planner.apply import apply_plan
from tiny import Stack, allocator_peak

pytestmark = pytest.mark.keeps("model-torch-inference-mode")

CONVERSIONS = {
    "bfloat16": lambda y: y.bfloat16(),
    "double": lambda y: y.double(),
    "half of a slice": lambda y: y[:, 1:].half(),
    "reshape": lambda y: y.T.reshape(-1),
    "flatten": lambda y: y.T.flatten(),
    "contiguous": lambda y: y.T.contiguous(),
    "matmul of an expanded one": lambda y: torch.matmul(y.T[None].expand(2, -1, -1), y),
    "cross entropy": lambda y: F.cross_entropy(y.bfloat16(), y.argmax(-1), reduction="none"),
}


def stack():
    torch.manual_seed(0)
    return Stack(*(nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64)) for _ in range(4)))


def policy_loss(convert):
    """The loss of a policy that is compared with what it was itself, as its old log-probabilities are."""

    def loss(model, batch):
        with torch.inference_mode():
            old = convert(model(batch["x"]))
        return model(batch["x"]).square().mean() * old.shape[0]

    return loss


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_model_in_inference_mode_takes_the_measured_peak(name):
    batch, loss = {"x": torch.randn(512, 64)}, policy_loss(CONVERSIONS[name])
    predicted = tightfit.estimate(stack(), batch, loss=loss, optimizer="sgd", device=round_device()).peak_bytes
    assert predicted == allocator_peak(stack(), batch, loss=loss, optimizer="sgd")


def test_a_plan_of_it_meets_its_peak_and_computes_the_same_bits():
    batch, loss = {"x": torch.randn(512, 64)}, policy_loss(CONVERSIONS["bfloat16"])
    asked = {"loss": loss, "optimizer": "sgd", "device": round_device()}
    plan = tightfit.plan(stack(), batch, "0.8x", levers=["recompute"], **asked)
    assert plan.levers
    model = stack()
    with apply_plan(plan, model):
        assert allocator_peak(model, batch, loss=loss, optimizer="sgd") == plan.peak_bytes
    assert str(tightfit.verify(stack(), batch, plan, loss=loss)).startswith("bit-equal")


class TeacherBlock(nn.Module):
    """A block that converts in inference mode within its forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 192), nn.GELU(), nn.Linear(192, 64))

    def forward(self, x):
        with torch.inference_mode():
            scale = self.inner(x.detach()).T.reshape(64, -1).double().abs().mean()
        return self.inner(x) * float(scale)


def test_blocks_that_convert_in_inference_mode_are_recomputed_bit_by_bit():
    def model():
        torch.manual_seed(0)
        return Stack(*(TeacherBlock() for _ in range(4)))

    batch = {"x": torch.randn(512, 64)}
    asked = {"loss": lambda m, b: m(b["x"]).square().mean(), "optimizer": "sgd", "device": round_device()}
    plan = tightfit.plan(model(), batch, "0.7x", levers=["recompute"], **asked)
    assert plan.levers
    assert str(tightfit.verify(model(), batch, plan, loss=asked["loss"])).startswith("bit-equal")


class Narrow(torch.Tensor):
    """Weights whose class multiplies in bf16: it converts inside of its dispatch, as float8 trainings do."""

    @staticmethod
    def __new__(cls, wide):
        return torch.Tensor._make_wrapper_subclass(cls, wide.shape, dtype=wide.dtype, requires_grad=wide.requires_grad)

    def __init__(self, wide):
        self.wide = wide

    def __tensor_flatten__(self):
        return ["wide"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Narrow(inner["wide"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Narrow, lambda t: t.wide, (args, kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            args = tree_map_only(torch.Tensor, lambda t: t.bfloat16().flatten().reshape(t.shape), args)
            return func(*args, **kwargs).to(torch.float32)
        return func(*args, **kwargs)


def test_a_class_of_tensors_that_converts_inside_of_its_dispatch_is_run_dry():
    model, weights = nn.Linear(256, 256, bias=False), []

    def loss(model, batch):
        weights.append(Narrow(model.weight.detach()))
        return F.linear(model(batch["x"]), weights.pop()).square().mean()

    batch = {"x": torch.randn(512, 256)}
    predicted = tightfit.estimate(model, batch, loss=loss, optimizer="sgd", device=round_device()).peak_bytes
    assert predicted == allocator_peak(model, batch, loss=loss, optimizer="sgd")


def test_the_monitor_records_what_was_converted_in_inference_mode():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters())
    with tightfit.monitor(model, optimizer) as monitored:
        for _ in range(2):
            x = torch.randn(4096, 256)
            with torch.inference_mode():
                wide = model(x).double()
            (model(x).square().mean() * wide.shape[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "4096x256 float64   _to_copy" in str(monitored)
