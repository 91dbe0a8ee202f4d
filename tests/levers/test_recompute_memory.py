"""Recompute saves the bytes it says: what the CPU allocator itself recorded, never what we think we hold."""

import gc
import weakref

import pytest
import torch
from blocks_with_dropout import BLOCKS, STREAM_BYTES, forward_bytes, step_peak
from trap_levers import LEVERS, TORCH_LEVERS

from exactness import allocator_record
from tightfit.levers.recompute import recompute

KINDS = ["whole blocks", "two segments", "products kept", "everything kept", "random half 1", "parts within blocks"]


def bytes_saved_inside_blocks(model, ids):
    """What autograd holds for the blocks in a plain run, block inputs and parameters not counted."""
    outside = {p.untyped_storage()._cdata for p in model.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        held[storage._cdata] = storage
        return tensor

    x = model.embed(ids)
    outside.add(x.untyped_storage()._cdata)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [x]
        for layer in model.layers:
            outputs.append(layer(outputs[-1]))
            outside.add(outputs[-1].untyped_storage()._cdata)
    return sum(storage.nbytes() for address, storage in held.items() if address not in outside)


def test_whole_blocks_hold_nothing_of_what_autograd_saved_inside_them(model, ids):
    plain, inside = forward_bytes(model, ids), bytes_saved_inside_blocks(model, ids)
    with recompute(model, "layers.*"):
        assert plain - forward_bytes(model, ids) == inside


@pytest.mark.sampled(1)
@pytest.mark.parametrize("segments", [1, 2, 3])
def test_segments_hold_one_residual_stream_each(model, ids, segments):
    with recompute(model, "layers.*"):
        every_block = forward_bytes(model, ids)
    with recompute(model, "layers.*", segments=segments):
        assert every_block - forward_bytes(model, ids) == (BLOCKS - segments) * STREAM_BYTES


def test_keeping_everything_holds_what_the_plain_run_holds(model, ids):
    plain = forward_bytes(model, ids)
    with LEVERS["everything kept"](model):
        assert forward_bytes(model, ids) == plain


@pytest.mark.keeps("recompute-never-holds-more")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lever", KINDS)
def test_no_policy_holds_more_than_the_plain_run(model, ids, lever):
    plain = forward_bytes(model, ids)
    with LEVERS[lever](model):
        assert forward_bytes(model, ids) <= plain


@pytest.mark.keeps("recompute-never-holds-more")
def test_the_peak_is_at_most_that_of_pytorchs_checkpoint(model, ids):
    plain = step_peak(model, ids)
    with TORCH_LEVERS["torch checkpoint"](model):
        theirs = step_peak(model, ids)
    with recompute(model, "layers.*"):
        ours = step_peak(model, ids)
    assert ours <= theirs < plain


def test_the_peak_of_kept_products_is_at_most_that_of_pytorchs_selective_checkpoint(model, ids):
    with TORCH_LEVERS["torch selective checkpoint"](model):
        theirs = step_peak(model, ids)
    with LEVERS["products kept"](model):
        assert step_peak(model, ids) <= theirs


@pytest.mark.keeps("memory-grow-step-step")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("lever", KINDS)
def test_twenty_steps_leave_the_same_bytes_as_one(model, ids, lever):
    def steps(count):
        for _ in range(count):
            model(ids).backward()

    with LEVERS[lever](model):
        _, gradients = allocator_record(lambda: steps(1))
        steps(17)
        _, more = allocator_record(lambda: steps(2))
    assert gradients == sum(p.nbytes for p in model.parameters())
    assert more == 0


@pytest.mark.sampled(2)
@pytest.mark.keeps("memory-grow-step-step")
@pytest.mark.parametrize("lever", KINDS)
def test_a_step_leaves_no_reference_cycle(model, ids, lever):
    alive = []

    def watch(module, inputs, output):
        alive.append(weakref.ref(output.untyped_storage()))

    for layer in model.layers:
        layer.register_forward_hook(watch)
        layer.up.register_forward_hook(watch)
    with LEVERS[lever](model):
        model(ids).backward()
        gc.collect()
        alive.clear()
        gc.disable()
        try:
            model(ids).backward()
            still = sum(reference() is not None for reference in alive)
            assert len(alive) == 2 * BLOCKS
            assert still == 0, f"{still} activations outlive the step"
            assert gc.collect() == 0, "the step left garbage that only the collector frees"
        finally:
            gc.enable()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lever", KINDS)
def test_a_graph_that_is_dropped_without_backward_leaves_nothing(model, ids, lever):
    with LEVERS[lever](model):
        model(ids)
        _, left = allocator_record(lambda: model(ids))
    assert left == 0


@pytest.mark.parametrize("lever", ["whole blocks", "products kept", "everything kept"])
def test_backward_frees_each_block_before_it_reaches_the_one_below(model, ids, lever):
    """When the gradient of a block's output arrives, what the blocks above it made is gone."""
    made: list[weakref.ref] = []
    above: list[int] = []

    def watch(module, inputs, output):
        place = len(made)
        made.append(weakref.ref(output.untyped_storage()))
        output.register_hook(lambda gradient: above.append(sum(r() is not None for r in made[place + 1 :])))

    with LEVERS[lever](model):
        for layer in model.layers:
            layer.register_forward_hook(watch)
        model(ids).backward()
    assert above == [0] * BLOCKS


def test_recomputed_values_go_as_soon_as_autograd_has_used_them(model, ids):
    """The peak of the backward of a single block is that of its plain step: nothing is made twice or kept along."""
    with recompute(model, "layers.*", segments=1):
        joined = step_peak(model, ids)
    assert joined <= step_peak(model, ids) + STREAM_BYTES
