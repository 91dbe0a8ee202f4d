"""A card that works late shows what was never waited for: work of a stream happens only when something needs it."""

import os

import pytest
import torch
from torch import nn

import tightfit
from exactness import bits
from tightfit.runtime.streams import CudaStreams

pytestmark = pytest.mark.usefixtures("values")
LATE = dict(item.split("=") for item in os.environ["TIGHTFIT_NULLCARD"].split(";"))["late"]
SIDE, MAIN = "1", "2"


def fetched(waits: bool) -> bool:
    """Whether twice what a side stream copies to the card is right, with or without waiting for the copy."""
    host = torch.rand(64).pin_memory()  # other numbers each time: old memory must not look right
    there = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        there.copy_(host, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    found = (there * 2).cpu()
    torch.cuda.synchronize()  # before the memory is anybody else's
    return torch.equal(found, host * 2)


def sent(waits: bool) -> bool:
    """Whether a side stream copies the right numbers of a tensor to the host, with or without waiting for them."""
    numbers = torch.rand(64)
    host, there = torch.zeros(64).pin_memory(), numbers.cuda()
    torch.cuda.synchronize()
    computed = there * 2
    side = torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(computed, non_blocking=True)
    side.synchronize()
    return torch.equal(host, numbers * 2)


def test_what_is_waited_for_is_right_on_every_card():
    assert fetched(waits=True)
    assert sent(waits=True)


def test_a_copy_that_nobody_waits_for_is_a_wrong_value_where_side_streams_are_late():
    assert fetched(waits=False) == (LATE != SIDE)


def test_a_copy_that_does_not_wait_is_a_wrong_value_where_the_default_stream_is_late():
    assert sent(waits=False) == (LATE != MAIN)


class Block(nn.Module):
    """Little arithmetic for the bytes that it keeps, so that races would show."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64))

    def forward(self, x):
        return torch.sin(x * self.weight) + x


def gradients(lever=None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(6)]).cuda()
    x = torch.linspace(0, 3, 512 * 64, device="cuda").view(512, 64)
    applied = lever(model) if lever else None
    for _ in range(3):
        model(x).square().sum().backward()
    if applied is not None:
        applied.undo()
    return [parameter.grad for parameter in model.parameters()]


def _removed(monkeypatch):
    """Take the waits of offload away: what comes back is used at once."""
    monkeypatch.setattr(CudaStreams, "wait", lambda self, stream, event: None)


def test_offload_is_bit_equal_and_wrong_without_its_waits(monkeypatch):
    plain = gradients()
    offloaded = gradients(lambda model: tightfit.offload(model, "*", smallest=1))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, offloaded, strict=True))
    _removed(monkeypatch)
    careless = gradients(lambda model: tightfit.offload(model, "*", smallest=1))
    same = all(torch.equal(bits(a), bits(b)) for a, b in zip(plain, careless, strict=True))
    assert same == (LATE == "0"), "the card that works late is the one that shows it"
