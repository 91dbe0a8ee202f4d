"""Streamed blocks on CUDA's path: bit-equal, right on cards that work late, and as large as two blocks."""

import os
from contextlib import contextmanager

import pytest
import torch
from test_exact_on_card import ON_CARDS
from test_stream_traps import build
from trap_cases import CASES
from trap_streams import STREAMS, has_frozen

import tightfit
import trained_blocks
from adapted_blocks import KINDS, built, loss, of_batch
from exactness import assert_bit_equal, run
from tightfit.errors import LeverError
from tightfit.levers.stream import lever, tiers
from tightfit.memory.disk import DiskStore
from tightfit.optim import OffloadedAdamW
from tightfit.runtime.streams import CudaStreams

pytestmark = pytest.mark.usefixtures("values")

LATE_MAIN = "late=2" in os.environ.get("TIGHTFIT_NULLCARD", "").split(";")
LATE = "late=0" not in os.environ.get("TIGHTFIT_NULLCARD", "late=0")  # not on a real card


def on_card(made):
    model, x = made
    return model.cuda(), x.detach().cuda().requires_grad_()


def step(name, levers=None):
    case = CASES[name]
    with torch.device("cuda"):
        return run(*on_card(build(name)), case.loss, backward=case.backward, levers=levers)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", STREAMS)
@pytest.mark.parametrize("name", ON_CARDS)
def test_stream_leaves_everything_bit_equal(name, way, monkeypatch):
    monkeypatch.setattr(lever, "SMALLEST_BYTES", 1)
    if LATE_MAIN and way == "from a file":
        pytest.skip("the reading thread would run late kernels beside this one, which draws from the same generator")
    if not has_frozen(build(name)[0]):
        pytest.skip("the blocks have no frozen weights of their own")
    assert_bit_equal(step(name), step(name, STREAMS[way]))


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_base_is_bit_equal_over_several_steps(kind, ahead):
    def levers(model):
        return tightfit.stream(model, "layers.*", ahead=ahead)

    plain = run(*on_card(built(kind)), loss, times=3)
    assert_bit_equal(plain, run(*on_card(built(kind)), loss, times=3, levers=levers))


@pytest.mark.keeps("streamed-file-on-card")
@pytest.mark.parametrize(("ahead", "is_cached"), [(0, True), (1, True), (1, False), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_from_a_file_are_bit_equal_over_several_steps(kind, ahead, is_cached, tmp_path, monkeypatch):
    """Each comes in many pieces, through more turns of the pinned buffers than there are; also past the file cache."""
    monkeypatch.setattr(tiers, "STAGE_BYTES", 1000 if is_cached else 4096)
    monkeypatch.setattr(DiskStore, "used_bytes", 0 if is_cached else 1 << 60)

    def levers(model):
        return tightfit.stream(model, "layers.*", ahead=ahead, tier=tmp_path)

    plain = run(*on_card(built(kind)), loss, times=3)
    assert_bit_equal(plain, run(*on_card(built(kind)), loss, times=3, levers=levers))


@pytest.mark.keeps("streamed-file-on-card")
def test_weights_in_a_file_take_no_host_memory_but_that_of_the_pinned_buffers(tmp_path):
    model, x = built()
    with tightfit.stream(model, "layers.*", tier=tmp_path, device="cuda"):
        found = tightfit.estimate(model, {"x": x}, loss=of_batch, device="cuda").host_by_category
    with tightfit.stream(model, "layers.*", device="cuda"):
        pinned = tightfit.estimate(model, {"x": x}, loss=of_batch, device="cuda").host_by_category
    buffers = tiers.STAGES * tiers.STAGE_BYTES
    weights = sum(p.nbytes for p in model["layers"].parameters() if not p.requires_grad)
    assert pinned["parameters"] >= weights
    assert found.get("parameters", 0) == 0
    assert found["workspace"] == pinned.get("workspace", 0) + buffers


def test_a_model_of_the_host_goes_to_the_card_without_its_blocks():
    (model, x), (plain, there) = built(), on_card(built())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with tightfit.stream(model, "layers.*", device="cuda"):
        weights = sum(p.nbytes for layer in model["layers"] for p in layer.parameters() if not p.requires_grad)
        assert torch.cuda.memory_allocated() - before < weights / 2, "two of six blocks, adapters and the head"
        torch.manual_seed(0)
        found = loss(model, x.detach().cuda())
        found.backward()
        assert all(p.grad.is_cuda for p in model.parameters() if p.requires_grad)
    torch.manual_seed(0)
    assert torch.equal(found, loss(plain, there))


def test_a_model_that_goes_to_the_card_after_stream_is_refused():
    model, x = built()
    with tightfit.stream(model, "layers.*"):
        model.cuda()
        with pytest.raises(LeverError, match=r"layers\.0 is streamed on the CPU .* device=\"cuda\""):
            loss(model, x.cuda())


@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_file", [False, True])
def test_trained_weights_are_bit_equal_over_several_steps(is_file, dtype, ahead, tmp_path):
    """Gradients are moved to the host as they are made, clipped, added over micro-batches and used there."""

    def outcome(stream):
        model, x = trained_blocks.built(dtype)
        model.cuda()
        x = x.cuda()
        tier = tmp_path if is_file else None
        handle = tightfit.stream(model, "layers.*", trained=True, ahead=ahead, tier=tier) if stream else None
        optimizer = OffloadedAdamW(model.parameters())
        losses = []
        for _ in range(3):
            for _ in range(2):
                losses.append(trained_blocks.loss(model, x))
                losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
        if handle is not None:
            away = [p for p in model["layers"].parameters() if not p.is_cuda]
            large = [p for p in model["layers"][0].parameters() if p.nbytes >= lever.SMALLEST_BYTES]
            assert len(away) == (trained_blocks.BLOCKS - ahead - 1) * len(large) > 0
            handle.undo()
            assert all(p.is_cuda for p in model.parameters())
        return [each.detach().cpu() for each in losses], weights

    torch.testing.assert_close(outcome(True), outcome(False), rtol=0, atol=0)


def test_an_optimizer_that_updates_on_the_card_is_refused():
    model, x = trained_blocks.built()
    model.cuda()
    with tightfit.stream(model, "layers.*", trained=True):
        optimizer = torch.optim.AdamW(model.parameters())
        trained_blocks.loss(model, x.cuda()).backward()
        with pytest.raises(LeverError, match="AdamW updates weights on cuda:0, and streamed ones are on the host"):
            optimizer.step()


@pytest.mark.parametrize("is_file", [False, True])
def test_the_copies_are_waited_for(is_file, monkeypatch, tmp_path):
    def outcome(levers):
        return run(*on_card(built()), loss, times=2, levers=levers)

    def levers(model):
        return tightfit.stream(model, "layers.*", tier=tmp_path if is_file else None)

    plain = outcome(None)
    assert_bit_equal(plain, outcome(levers))
    if LATE:
        monkeypatch.setattr(CudaStreams, "wait", lambda self, stream, event: None)
        with pytest.raises(AssertionError, match="differ"):
            assert_bit_equal(plain, outcome(levers))
        torch.cuda.synchronize()


@contextmanager
def full_card():
    """Not a byte is free."""
    torch.cuda.empty_cache()
    taken, sizes = [], [1 << 20, 1 << 14, 512]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total)
    while sizes:
        try:
            taken.append(torch.empty(sizes[0], dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            del sizes[0]
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("trained", [False, True])
def test_weights_for_which_a_card_has_no_room_stay_on_the_host_when_the_lever_ends(trained):
    model, x = on_card(trained_blocks.built(torch.float32) if trained else built("fp32"))
    before = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    handle = tightfit.stream(model, "layers.*", trained=trained)
    loss(model, x) if not trained else trained_blocks.of_batch(model, {"x": x})
    with full_card(), pytest.warns(UserWarning, match="no room for all weights"):
        handle.undo()
    kept = {name: weight.device.type for name, weight in model.named_parameters()}
    assert "cpu" in kept.values()
    assert all(torch.equal(before[name], weight.cpu()) for name, weight in model.named_parameters())
