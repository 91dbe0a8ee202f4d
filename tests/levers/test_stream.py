"""Streamed weights: where they are, what still works while they are away, and what is refused."""

import copy
import importlib.util
import io
from contextlib import nullcontext

import pytest
import torch

import tightfit
from adapted_blocks import BLOCKS, KINDS, WIDTH, built, loss, through
from exactness import allocator_record, assert_bit_equal, run
from tightfit.errors import LeverError, OutputError
from tightfit.levers.stream import streamed_bytes


def streamed(model, **how):
    return tightfit.stream(model, "layers.*", **how)


def content(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.keeps("streamed-bits")
@pytest.mark.parametrize("kind", KINDS)
def test_every_base_is_bit_equal_over_several_steps(kind):
    if kind == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    assert_bit_equal(run(*built(kind), loss, times=3), run(*built(kind), loss, times=3, levers=streamed))


@pytest.mark.sampled(2)
@pytest.mark.keeps("streamed-bits")
@pytest.mark.parametrize("kind", KINDS)
def test_only_one_block_is_in_memory_while_a_step_runs(kind):
    def rise(levers):
        model, x = built(kind)
        with levers(model):
            loss(model, x).backward()  # gradients exist afterwards
            return allocator_record(lambda: loss(model, x).backward()).highest

    plain = rise(lambda model: tightfit.recompute(model, "layers.*"))
    model, _ = built(kind)
    whole = streamed_bytes(model, [f"layers.{n}" for n in range(BLOCKS)])
    both = rise(lambda model: (tightfit.recompute(model, "layers.*"), streamed(model))[1])
    # One block is in memory before the step, and one at most at any time in it.
    assert both <= plain + whole // BLOCKS, "a block at most arrives before another one leaves"
    frozen = [p for layer in model["layers"] for p in layer.parameters() if not p.requires_grad and p.nbytes >= 512]
    with streamed(model):
        in_memory = sum(p.untyped_storage().resizable() for p in frozen)
        assert in_memory == len(frozen) // BLOCKS, "the others are in the file"


def test_a_graph_that_is_dropped_or_waits_keeps_no_weight_in_memory():
    model, x = built()
    with streamed(model) as handle:
        waiting = [loss(model, x) for _ in range(3)]
        assert len(handle.ring.window.here) == 1
        there = [w for block in handle.ring.blocks.values() for w in block.weights if w.storage.nbytes()]
        assert {place.tensor for weight in there for place in weight.places} < set(model["layers"][-1].parameters())
        for each in waiting:
            each.backward()


@pytest.mark.keeps("streamed-bits")
def test_the_state_of_a_streamed_model_is_that_of_the_plain_one():
    model, _ = built()
    plain = content(model)
    with streamed(model):
        assert same(plain, content(model))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        assert same(plain, torch.load(file))
    assert same(plain, content(model))


@pytest.mark.keeps("streamed-bits")
def test_loaded_weights_and_writes_between_steps_are_what_the_blocks_compute_with():
    (model, x), (other, _) = built(), built()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.eval(), other.eval()
    with streamed(model):
        through(model, x)
        model.load_state_dict(other.state_dict())
        assert torch.equal(through(model, x), through(other, x))
        with torch.no_grad():
            for each in (model, other):
                for layer in each["layers"]:
                    layer.up.weight.add_(0.25)  # one of them is on the device, the others are not
        assert torch.equal(through(model, x), through(other, x))
        for each in (model, other):
            each["layers"][2].down.weight.data = torch.ones(WIDTH, 4 * WIDTH)
        assert torch.equal(through(model, x), through(other, x))
    assert same(content(model), content(other))


@pytest.mark.keeps("streamed-bits")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: torch.load(_saved(model), weights_only=False)])
def test_a_copy_of_a_streamed_model_streams_too(copied):
    model, x = built()
    model.eval()
    with streamed(model):
        through(model, x)
        twin = copied(model)
        assert torch.equal(through(twin, x), through(model, x))
        assert len(twin["layers"][0].forward.ring.window.here) == 1
        with torch.no_grad():
            model["layers"][1].up.weight.zero_()
        assert not torch.equal(through(twin, x), through(model, x))
    tightfit.undo(twin)
    assert not any("forward" in vars(layer) for layer in twin["layers"])


def _saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_weights_that_are_mapped_from_a_file_are_streamed_like_others(tmp_path):
    model, x = built()
    model.eval()
    plain = loss(model, x).detach()
    torch.save(model.state_dict(), tmp_path / "weights")
    model.load_state_dict(torch.load(tmp_path / "weights", mmap=True), assign=True)
    for layer in model["layers"]:
        layer.up.requires_grad_(False), layer.down.requires_grad_(False)
    with streamed(model):
        for _ in range(2):
            assert torch.equal(loss(model, x), plain)
    assert torch.equal(loss(model, x), plain)


def test_memory_that_numpy_has_seen_is_left_to_it():
    model, x = built()
    model.eval()
    plain = loss(model, x).detach()
    with streamed(model):
        seen = [layer.up.weight.detach().numpy() for layer in model["layers"]]  # one of them is in memory
        before = [array.copy() for array in seen]
        for _ in range(2):
            found = loss(model, x)
            found.backward()
            assert torch.equal(found, plain)
        assert all((array == copied).all() for array, copied in zip(seen, before, strict=True))
    assert torch.equal(loss(model, x), plain)


def test_what_blocks_share_stays_in_memory():
    model, x = built()
    for layer in model["layers"]:
        layer.up.weight = model["layers"][0].up.weight
    plain = loss(model.eval(), x).detach()
    with streamed(model):
        assert model["layers"][0].up.weight.untyped_storage().resizable()
        assert not model["layers"][3].down.weight.untyped_storage().resizable()
        assert torch.equal(loss(model, x), plain)


def test_hooks_see_the_weights_of_their_block():
    model, x = built()
    seen = []
    model["layers"][3].up.register_forward_hook(lambda module, *_: seen.append(module.weight.sum()))
    model["layers"][3].down.register_full_backward_hook(lambda module, *_: seen.append(module.weight.sum()))
    loss(model, x).backward()
    with streamed(model):
        loss(model, x).backward()
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])


def test_checkpoints_of_the_models_own_and_their_savings_remain():
    def checkpointed(model, x):
        for layer in model["layers"]:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return model["head"](x).square().sum()

    plain = run(*built(), checkpointed, times=2)
    assert_bit_equal(plain, run(*built(), checkpointed, times=2, levers=streamed))

    def held(levers):
        model, x = built()
        waiting = []
        with levers(model):
            return allocator_record(lambda: waiting.append(checkpointed(model, x))).left

    one = sum(p.nbytes for p in built()[0]["layers"][0].parameters() if not p.requires_grad and p.nbytes >= 512)
    # The record does not see the first block leave, which was there before it.
    assert held(streamed) - one == held(lambda model: nullcontext())


def test_trained_blocks_are_refused_by_the_names_of_their_weights():
    model, _ = built()
    model["layers"][2].requires_grad_(True)
    with pytest.raises(LeverError, match=r"all weights of layers\.2 are trained \(one, two, up\.weight.*adapters"):
        streamed(model)
    assert not any("forward" in vars(layer) for layer in model["layers"])


def test_a_weight_that_is_trained_later_is_refused():
    model, x = built()
    with streamed(model):
        model["layers"][2].up.weight.requires_grad_(True)
        with pytest.raises(LeverError, match=r"layers\.2 is streamed"):
            through(model, x)


@pytest.mark.parametrize("where", ["hf_device_map", "layers.1"])
def test_a_model_that_accelerate_offloads_is_refused(where):
    model, _ = built()
    if where == "hf_device_map":
        model.hf_device_map = {"layers.0": 0, "layers.1": "cpu"}
    else:
        model["layers"][1].down._hf_hook = object()
    with pytest.raises(LeverError, match=f"accelerate offloads this model .{where}"):
        streamed(model)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_accelerates_own_hooks_are_seen(way, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, _ = built()
    where = [tmp_path] if way == "disk_offload" else []
    getattr(accelerate, way)(model, *where, execution_device="cpu")
    with pytest.raises(LeverError, match=r"accelerate offloads this model .*load it without device_map"):
        streamed(model)


def test_what_else_is_refused_is_one_line(tmp_path):
    model, _ = built()
    with pytest.raises(LeverError, match="no module matches 'blocks"):
        tightfit.stream(model, "blocks.*")
    with pytest.raises(LeverError, match="pinned memory is of CUDA devices"):
        streamed(model, tier="pinned")
    with pytest.raises(LeverError, match="ahead=-1"):
        streamed(model, ahead=-1)
    with pytest.raises(OutputError, match=r"^stream: .*absent"):
        streamed(model, tier=tmp_path / "absent")
    with pytest.raises(LeverError, match=r"layers\.0\.\w+(\.weight)? has no memory"):
        streamed(model.to("meta"))
    model, _ = built()
    with tightfit.capture(model, "layers.*"), pytest.raises(LeverError, match="is already captured"):
        streamed(model)
    with tightfit.recompute(model, "layers.*", segments=2), pytest.raises(LeverError, match="is already recomputed"):
        streamed(model)
    with streamed(model):
        with pytest.raises(LeverError, match="is already streamed"):
            streamed(model)
        with pytest.raises(LeverError, match="is already streamed"):
            tightfit.capture(model, "layers.*")
    assert same(content(model), content(built()[0]))


def test_an_exception_in_a_block_leaves_the_next_step_right():
    def failing(model, x):
        hook = model["layers"][3].down.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            through(model, x)
        hook.remove()
        for layer in model["layers"]:
            layer.calls.zero_()
        torch.manual_seed(3)
        return loss(model, x)

    assert_bit_equal(run(*built(), failing, times=2), run(*built(), failing, times=2, levers=streamed))
