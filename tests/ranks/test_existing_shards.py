"""Models that somebody else has sharded with FSDP2: what is read off them, and the copies that are simulated."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats as looked_up
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tightfit.errors import LeverError
from tightfit.integrations.model_ranks import ALONE, ranks_of_model
from tightfit.levers.recompute.lever import apply_rule
from tightfit.levers.recompute.rule import every_block
from tightfit.planner.step_figures import fingerprint
from tightfit.ranks.existing_shards import as_before_sharding, sharded_alike, shards_of
from tightfit.ranks.world import Sharding, World
from tightfit.runtime.internals import fake_process_group, forget_placements
from tightfit.tracing.unbacked import is_unbacked
from tiny import decoder

pytestmark = pytest.mark.keeps("guests-whose-model-fsdp2")

RANKS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def rank():
    """A rank of four that sends nothing."""
    with fake_process_group(0, RANKS):
        yield
    forget_placements()


def in_units(model, **settings):
    """Sharded as accelerate does it: blocks and the embedding alone, the last norm with the head, then the rest."""
    for layer in model.layers:
        fully_shard(layer, mp_policy=BF16, **settings)
    fully_shard(model.embedding, reshard_after_forward=False)
    fully_shard([model.norm, model.head], reshard_after_forward=False)
    return fully_shard(model)


def test_units_are_read_with_their_arguments_inner_ones_first(rank):
    found = shards_of(in_units(decoder(num_layers=2, tie_embeddings=False)), RANKS)
    units = {unit.paths: unit for unit in found.units}
    assert list(units)[-1] == ("",)
    assert set(units) == {("layers.0",), ("layers.1",), ("embedding",), ("norm", "head"), ("",)}
    assert units["layers.0",].policy == BF16 != units["embedding",].policy
    assert units["layers.0",].reshard_after_forward is None
    assert units["norm", "head"].reshard_after_forward is False
    assert units["norm", "head"].parameters == ("norm.weight", "head.weight")
    assert not found.keeps_all
    assert shards_of(
        in_units(decoder(num_layers=2, tie_embeddings=False), reshard_after_forward=False), RANKS
    ).keeps_all
    model = in_units(decoder(num_layers=2, tie_embeddings=False), reshard_after_forward=True)
    model.set_reshard_after_forward(False)
    assert shards_of(model, RANKS).keeps_all
    # A group of modules comes before what is around one of them, wherever the other is.
    model = decoder(num_layers=2, tie_embeddings=False)
    fully_shard([model.embedding, model.layers[1].mlp])
    fully_shard(model.layers[1])
    fully_shard(model)
    paths = [unit.paths for unit in shards_of(model, RANKS).units]
    assert paths == [("embedding", "layers.1.mlp"), ("layers.1",), ("",)]


def test_a_copy_is_the_model_as_it_was_and_the_model_stays_sharded(rank):
    before = decoder(num_layers=2, tie_embeddings=False)
    names, kinds = fingerprint(before), [type(module) for module in before.modules()]
    model = in_units(decoder(num_layers=2, tie_embeddings=False))
    own, sharded = dict(model.named_parameters()), [type(module) for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    told, model._own_hooks = [], [1]  # `transformers` has a list of that kind of name
    model.layers[0].register_forward_hook(lambda module, args, output: told.append(1))
    with apply_rule(model, every_block(["layers.0", "layers.1"])):
        made = as_before_sharding(model)
    assert [type(module) for module in made.modules()] == kinds
    assert fingerprint(made) == names == fingerprint(model)
    assert all(type(p) is nn.Parameter and is_unbacked(p) for p in made.parameters())
    assert [len(module._forward_hooks) for module in made.modules()].count(1) == 1  # the user's
    assert not any(module._forward_pre_hooks for module in made.modules())
    assert made._own_hooks == [1]
    assert "forward" in vars(made.layers[1])  # the lever
    assert "forward" not in vars(model.layers[1])
    # The model itself
    assert [type(module) for module in model.modules()] == sharded
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert all(parameter is own[name] for name, parameter in model.named_parameters())
    shards = shards_of(model, RANKS)
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape)))
    again = sharded_alike(made, shards, init_device_mesh("cpu", (RANKS,)))
    assert set(shards_of(again, RANKS).units) == set(shards.units)


def test_tied_weights_are_one_parameter_of_the_copy(rank):
    model = decoder(num_layers=1, tie_embeddings=True)
    assert model.embedding.weight is model.head.weight
    fully_shard([model.embedding, model.norm, model.head])
    made = as_before_sharding(fully_shard(model))
    assert made.embedding.weight is made.head.weight
    assert len(list(made.parameters())) == len(list(model.parameters()))


def test_gathered_weights_are_let_go_of_first(rank):
    model = fully_shard(decoder(num_layers=1))
    model.unshard()
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    joined = ranks_of_model(model, "apply_budget", shards_no_sync=True)
    assert joined.world == World(RANKS, sharding=Sharding(False), shards=joined.shards)
    assert joined.shards.no_sync
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert ranks_of_model(decoder(num_layers=1), "apply_budget") is ALONE


def of_tensor_parallel(mesh):
    return parallelize_module(decoder(num_layers=1), mesh, {"layers.*.mlp.up_proj": ColwiseParallel()})


def copied_on_each():
    return fully_shard(decoder(num_layers=1), mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("copies", "shards")))


def in_another_order():
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("copies", "shards"))
    return fully_shard(decoder(num_layers=1), mesh=mesh)


def over_half():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "half"))
    return fully_shard(decoder(num_layers=1), mesh=mesh["half"])


def twice():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return fully_shard(of_tensor_parallel(mesh["tensor"]), mesh=mesh["data"])


def with_ignored():
    model = decoder(num_layers=1)
    return fully_shard(model, ignored_params={model.embedding.weight})


def in_part():
    model = decoder(num_layers=1)
    fully_shard(model.layers[0], reshard_after_forward=2)
    return fully_shard(model)


def along_columns():
    return fully_shard(decoder(num_layers=1), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def told(name, *arguments):
    def made():
        model = decoder(num_layers=1)
        fully_shard(model.layers[0])
        getattr(fully_shard(model), name)(*arguments)
        return model

    return made


def prefetching():
    model = decoder(num_layers=2, tie_embeddings=False)
    layers = [fully_shard(layer) for layer in model.layers]
    layers[0].set_modules_to_forward_prefetch([layers[1]])
    return fully_shard(model)


def of_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(decoder(num_layers=1), device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (copied_on_each, "the model is copied on every rank and sharded over none of them"),
        (in_another_order, "the model has its ranks in another order than their numbers'"),
        (over_half, "the model is sharded over 2 of 4 ranks"),
        (twice, r"the model holds parameters that are sharded twice \(tensor parallel inside of FSDP2\)"),
        (lambda: of_tensor_parallel(init_device_mesh("cpu", (4,))), "sharded by another engine than FSDP2"),
        (with_ignored, r"embedding.weight is left out \(ignored_params\)"),
        (in_part, r"layers.0 frees its gathered weights in part \(reshard_after_forward is a number\)"),
        (along_columns, r"the model is sharded along dimension \d \(shard_placement_fn\)"),
        (told("set_gradient_divide_factor", 2.0), "FSDP2's gradient_divide_factor was set for"),
        (told("set_reshard_after_backward", False), "FSDP2's reshard_after_backward was set for"),
        (prefetching, r"layers.0 gathers the weights of others ahead \(set_modules_to_forward_prefetch\)"),
        (of_fsdp1, "the model is wrapped in FullyShardedDataParallel"),
        (
            lambda: fully_shard(decoder(num_layers=1), offload_policy=CPUOffloadPolicy(pin_memory=False)),
            r"the model has its shards on the host \(CPUOffloadPolicy\)",
        ),
    ],
)
def test_what_no_rank_is_played_with_is_one_line(rank, made, line):
    with pytest.raises(LeverError, match=f"^apply_budget: .*({line})") as caught:
        ranks_of_model(made(), "apply_budget")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_needs_the_whole_model_is_one_line(rank):
    joined = ranks_of_model(fully_shard(decoder(num_layers=1)), "MemoryBudget")
    for refuse, line in (
        (joined.refuse_recovery, "recover=True repeats a step"),
        (joined.refuse_verification, "verify=True compares whole models"),
    ):
        with pytest.raises(LeverError, match=f"^MemoryBudget: {line}"):
            refuse("MemoryBudget")


def test_only_one_rank_shows_a_refusal(monkeypatch, capsys):
    import sys

    with fake_process_group(1, RANKS):
        monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: print(value))
        with pytest.raises(LeverError) as caught:
            ranks_of_model(in_another_order(), "apply_budget")
        sys.excepthook(LeverError, caught.value, None)
        assert capsys.readouterr().out == ""
        sys.excepthook(LeverError, LeverError("of the script itself"), None)
        assert capsys.readouterr().out == "of the script itself\n"


def test_what_was_learnt_of_real_shards_serves_no_played_ones_and_the_other_way_round(rank):
    model = fully_shard(decoder(num_layers=1))
    joined, weight = ranks_of_model(model, "apply_budget"), next(model.parameters()).detach()

    def learns():
        known, unknown = looked_up()
        weight * 2
        return [b - a for a, b in zip((known, unknown), looked_up(), strict=True)]

    assert learns() == [0, 1]
    assert learns() == [1, 0]
    with joined.apart():
        assert learns() == [0, 1]
        assert learns() == [1, 0]
    assert learns() == [0, 1]
