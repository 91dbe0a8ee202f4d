"""Rows of `fit` for several cards."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from command_line import mistake
from command_line import tightfit as run
from made_up_devices import even
from tightfit import TokenBatch, fit, plan
from tightfit.errors import CannotFit, InputError
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.request import Request
from tightfit.planner.search import fastest
from tightfit.planner.search.of_ranks import search_ranks
from tightfit.ranks.world import World
from tightfit.recipes.choices import Wanted, least_bytes_of_rank
from tightfit.recipes.of_ranks import RankStep, recipes_of_ranks, sizes_of
from tightfit.recipes.records import Recipe
from tightfit.recipes.ways_out import Finder
from tightfit.training.config import AdapterConfig
from tiny_adapters import adapted, saved_llama

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")

BATCH = TokenBatch(1, 16, 64)


def tiny():
    return Decoder(DecoderConfig(hidden_size=16, num_layers=2, num_heads=2, vocab_size=64))


@pytest.mark.keeps("tightfit-fit-world-size")
def test_rows_of_several_cards_are_plans_for_all_ranks_with_the_tokens_of_all():
    asked = {"device": even(), "dtype": "fp32", "optimizer": "adamw"}
    found = fit(tiny(), BATCH, world_size=3, parallel="ddp", **asked)
    assert [(row.world_size, row.parallel, row.fits) for row in found] == [(3, "ddp", True), (2, "ddp", True)]
    alone = plan(tiny(), BATCH, "80%", device=even(), world_size=3, parallel="ddp", levers="rounding")
    first = found[0].to_dict()
    assert (first["peak_bytes"], first["step_seconds"]) == (alone.peak_bytes, alone.step_seconds)
    assert first["rank_peak_bytes"] == list(alone.rank_peak_bytes) == [alone.peak_bytes] * 3
    assert first["tokens_per_second"] == pytest.approx(3 * 16 / alone.step_seconds)
    assert (first["nodes"], first["communicator_bytes"]) == (1, 0)


@pytest.mark.keeps("tightfit-fit-world-size")
def test_numbers_of_cards_go_up_to_the_one_that_was_asked_for():
    assert sizes_of(World(8)) == [8, 4, 2]
    assert sizes_of(World(6)) == [6, 4, 2]
    assert sizes_of(World(16, nodes=2)) == [16]


@pytest.mark.keeps("tightfit-fit-world-size")
def test_a_recipe_whose_shards_alone_exceed_the_budget_is_not_traced():
    made, recipe = tiny(), Recipe(optimizer="adamw_fused")
    numbers = sum(p.numel() for p in made.parameters())
    assert least_bytes_of_rank(recipe, made, World(2)) == 16 * numbers // 2
    assert least_bytes_of_rank(recipe, made, World(2, "ddp")) == 20 * numbers
    found = fit(made, BATCH, device=even(), budget=1000, world_size=2, dtype="fp32")
    assert [row.fits for row in found] == [False, False]
    assert [row.needed_bytes > 1000 for row in found] == [True, True]


def test_rows_of_several_cards_are_searched_without_last_resorts(monkeypatch):
    tried = []
    monkeypatch.setattr(fastest, "try_last_resorts", lambda search: tried.append("last resorts"))
    monkeypatch.setattr(fastest, "join_segments", lambda search: tried.append("segments"))
    asked = Request.of(tiny(), BATCH, device=even(), world_size=2, parallel="ddp", levers=[])
    least = least_bytes_of_rank(Recipe(), tiny(), World(2, "ddp")) + 2000
    row = fit(tiny(), BATCH, device=even(), dtype="fp32", budget=least, levers=[], world_size=2, parallel="ddp")[0]
    assert (row.fits, tried) == (False, [])
    with pytest.raises(CannotFit):
        search_ranks(asked.checked(), World(2, "ddp"), least)
    assert tried == ["last resorts", "segments"]


def test_a_row_that_the_device_has_no_room_for_says_what_it_takes_there(monkeypatch):
    def without_room(*asked, **more):
        raise CannotFit("no room", 100, taken_bytes=1 << 40)

    monkeypatch.setattr("tightfit.recipes.of_ranks.search_ranks", without_room)
    row = fit(tiny(), BATCH, device=even(), dtype="fp32", world_size=2, parallel="ddp")[0]
    assert (row.fits, row.peak_bytes, row.needed_bytes) == (False, 100, 1 << 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", "2", "--output", "run.yaml"), "--output writes a recipe of one process"),
        (("--world-size", "3", "--nodes", "2"), "3 ranks cannot be spread evenly"),
        (("--nodes", "2"), "nodes is given without world_size"),
    ],
)
def test_what_rows_of_several_cards_do_not_have_is_one_line(arguments, message):
    assert message in mistake("fit", "--model", "cpu8", "--device", "h100", *arguments)


@pytest.mark.parametrize("settled", [{"base": "nf4"}, {"step_in_backward": True}])
def test_rows_of_several_cards_have_whole_weights_and_step_after_backward(settled):
    with pytest.raises(InputError, match="and world_size are both given"):
        recipes_of_ranks(Request.of(tiny(), BATCH, device=even()), Wanted(**settled), may_adapt=True)


@pytest.mark.keeps("fit-rows-adapters-several")
def test_adapters_are_tried_on_several_cards_where_the_model_can_have_them():
    asked = Request.of(tiny(), BATCH, device=even())
    tried = recipes_of_ranks(asked, Wanted(), may_adapt=True)
    assert [recipe.adapter.base for recipe in tried if recipe.adapter is not None] == ["fp32"]  # a CPU's usual base
    assert tried[:-1] == recipes_of_ranks(asked, Wanted(), may_adapt=False)
    alone = recipes_of_ranks(asked, Wanted(trains="adapters"), may_adapt=True)
    assert alone == tried[-1:]
    with pytest.raises(InputError, match="no recipe is left to try: adapters are for models of `transformers`"):
        fit(tiny(), BATCH, device=even(), adapter=AdapterConfig(), world_size=2)


@pytest.mark.slow  # 15 s: plans of all ranks
@pytest.mark.keeps("fit-rows-adapters-several")
def test_a_row_of_adapters_is_a_plan_for_all_ranks_of_what_is_trained(tmp_path):
    folder = str(saved_llama(tmp_path))
    asked = {"device": even(), "world_size": 2, "parallel": "fsdp2", "precision": "fp32"}
    (row,) = fit(folder, TokenBatch(1, 16, 600), adapter=AdapterConfig(r=4), **asked)
    assert (row.fits, row.world_size, row.recipe.trains) == (True, 2, "LoRA r 4")
    made = adapted(tmp_path, r=4)
    alone = plan(made, TokenBatch(1, 16, 600), "80%", optimizer="adamw_fused", levers="rounding", **asked)
    assert row.rank_peak_bytes == alone.rank_peak_bytes
    whole = fit(folder, TokenBatch(1, 16, 600), dtype="fp32", **asked)
    everything = next(each for each in whole if each.recipe.adapter is None)
    assert row.peak_bytes < everything.peak_bytes


@pytest.mark.slow  # searches recipes twice
@pytest.mark.keeps("tightfit-fit-world-size")
def test_the_command_has_rows_with_cards_and_exits_with_3_where_none_fits(tmp_path):
    narrow = ("--dtype", "fp32", "--optimizer", "sgd", "--seq-len", "64")
    model = str(saved_llama(tmp_path))
    asked = run(
        "fit", "--model", model, "--device", "h100", "--world-size", "2", "--budget", "64KiB", "--json", *narrow
    )
    assert asked.code == 3
    rows = json.loads(asked.out)["recipes"]
    assert {(row["world_size"], row["parallel"]) for row in rows} == {(2, "ddp"), (2, "fsdp2")}
    assert all(row["name"].startswith("2 cards, ") for row in rows)


@pytest.mark.keeps("longest-sequence-largest-batch")
@pytest.mark.slow  # a plan of all ranks for each of the two sizes
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_the_longest_sequence_and_largest_batch_of_ranks_have_a_plan(parallel):
    asked = {"device": even(), "world_size": 2, "parallel": parallel}
    made = tiny()
    budget = 2 * plan(made, BATCH, "80%", **asked).peak_bytes
    row = fit(made, BATCH, budget=budget, dtype="fp32", optimizer="adamw", **asked)[0]
    longest, largest = row.longest_sequence, row.largest_batch
    assert longest is not None
    assert largest is not None
    assert longest.confirmed
    assert largest.confirmed
    assert longest.value > 2 * BATCH.length
    assert largest.value > 2 * BATCH.size
    for batch in (BATCH._replace(length=longest.value), BATCH._replace(size=largest.value)):
        found = plan(tiny(), batch, budget, levers="rounding", **asked)
        assert max(found.rank_peak_bytes) <= budget
    # What is well above them does not fit with the levers that they were found with.
    step = sized(made, budget, parallel)
    assert step.played(1, int(1.1 * longest.value)).over > 0
    assert step.played(int(1.1 * largest.value) + 1, BATCH.length).over > 0


def sized(model, budget, parallel):
    asked = Request.of(model, BATCH, device=even(), levers="rounding", world_size=2, parallel=parallel)
    request, world = asked.checked(), World(2, parallel)
    return RankStep.of(
        search_ranks(request, world, budget), request, budget, least_bytes_of_rank(Recipe(), model, world)
    )


@pytest.mark.slow  # searches recipes of ranks
@pytest.mark.keeps("longest-sequence-largest-batch")
def test_every_size_that_is_named_was_played_whole(monkeypatch):
    played, own = [], RankStep.played

    def noted(step, size, length):
        found = own(step, size, length)
        played.append((step.world.size, size, length, found.fits))
        return found

    monkeypatch.setattr(RankStep, "played", noted)
    asked = {"device": even(), "dtype": "fp32", "optimizer": "adamw", "parallel": "ddp"}
    budget = 2 * plan(tiny(), BATCH, "80%", device=even(), world_size=2, parallel="ddp").peak_bytes
    for row in fit(tiny(), BATCH, budget=budget, world_size=3, **asked):
        sizes = row.to_dict()
        assert (row.world_size, 1, sizes["longest_sequence"], True) in played
        assert (row.world_size, sizes["largest_batch"], BATCH.length, True) in played
    assert len([each for each in played if each[0] == 2]) < len([each for each in played if each[0] == 3])


def test_a_batch_of_other_tensors_has_no_sizes():
    rows = fit(
        nn.Linear(8, 8), (torch.ones(4, 8),), loss=squares, device=even(), dtype="fp32", world_size=2, parallel="ddp"
    )
    assert (rows[0].fits, rows[0].longest_sequence, rows[0].largest_batch) == (True, None, None)


def squares(model, batch):
    return model(*batch).square().mean()


# Ways out


def refused(budget, batch=BATCH, **asked):
    with pytest.raises(CannotFit) as caught:
        plan(tiny(), batch, budget, device=even(), **asked)
    return caught.value


def finder_of(error):
    return Finder(error.refusal)


def kept(way, budget):
    """Whether the plan of a way keeps all ranks within the budget, and is the one that the way said."""
    found = way.plan()
    return max(found.rank_peak_bytes) <= budget and found.peak_bytes == way.peak_bytes


@pytest.mark.slow  # ways out of ranks, and a plan
@pytest.mark.keeps("plan-fit-several-cards")
def test_fsdp2_is_a_way_out_for_ddp_and_its_plan_has_the_peak_that_was_said():
    error = refused(300_000, world_size=2, parallel="ddp")
    finder = finder_of(error)
    finder.try_sharding()
    (way,) = finder.ways
    assert (way.name, way.kind, way.flags, way.fits) == ("FSDP2", "rounding", "--parallel fsdp2", True)
    assert 'world_size=2, parallel="fsdp2"' in way.python
    assert kept(way, 300_000)


@pytest.mark.keeps("plan-fit-several-cards")
@pytest.mark.slow  # four refusals and three plans of all ranks
def test_more_cards_and_smaller_batches_are_ways_out_that_have_plans():
    budget = refused(5000, world_size=4, parallel="fsdp2").least_bytes + 2000
    batch = BATCH._replace(size=4)
    finder = finder_of(refused(budget, world_size=2, parallel="fsdp2"))
    finder.try_more_cards()
    assert [(way.kind, way.flags, way.fits) for way in finder.ways] == [("cards", "--world-size 4", True)]
    assert kept(finder.ways[0], budget)
    budget = refused(5000, world_size=2, parallel="fsdp2").least_bytes + 20_000
    finder = finder_of(refused(budget, batch, world_size=2, parallel="fsdp2"))
    finder.try_sizes()
    flags = [way.flags for way in finder.ways]
    assert [flag.partition(" ")[0] for flag in flags] == ["--seq-len", "--batch-size"]
    assert all(way.fits and kept(way, budget) for way in finder.ways)


@pytest.mark.keeps("plan-fit-several-cards")
@pytest.mark.slow  # 13 s: every way out on shards
def test_an_optimizer_is_not_changed_on_shards():
    finder = finder_of(refused(200_000, world_size=2, parallel="fsdp2"))
    finder.try_exact()
    finder.try_inexact()
    assert finder.ways
    assert not [way.name for way in finder.ways if "optimizer" in way.name]


@pytest.mark.keeps("plan-fit-several-cards")
@pytest.mark.slow  # ways out on several cards, and the rows of the one that is taken
def test_the_command_says_ways_out_for_several_cards_that_are_rows_when_they_are_taken():
    asked = ("fit", "--model", "cpu8", "--device", "h100", "--dtype", "fp32", "--budget", "150MiB")
    said = run(*asked, "--world-size", "2", "--parallel", "ddp")
    assert said.code == 3
    (taking,) = [line for line in said.err.splitlines() if line.startswith("1. --")]
    assert taking == "1. --world-size 4 --parallel fsdp2"
    assert run(*asked, *taking.split()[1:]).code == 0
