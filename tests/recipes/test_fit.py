"""Recipes for a device: found, ordered, written, and trained for real in the bytes that were predicted."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

import tightfit
from command_line import mistake
from command_line import tightfit as run
from made_up_devices import even
from tightfit import TokenBatch
from tightfit.cli.question import Question
from tightfit.cli.recipe_subject import recipe_subject, wanted
from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, ConfigError, DataError, InputError, ModelError
from tightfit.models.dtypes import WEIGHT_DTYPES, convert_weights
from tightfit.models.saving import save_model
from tightfit.planner.request import Request
from tightfit.planner.search.least import least_levers
from tightfit.recipes import choices, whole_step
from tightfit.recipes.choices import Wanted, half_of, not_installed, recipes_for, why_none
from tightfit.recipes.ranking import ranked
from tightfit.recipes.records import LargestSize, Outcome, Recipe, RecipesRecord
from tightfit.recipes.table import NEAREST, describe_recipes
from tightfit.recipes.variants import optimizer_of, with_recipe
from tightfit.recipes.written import WrittenSections, next_steps, written
from tightfit.step import StepSettings
from tightfit.training.config import AdapterConfig, parse_config
from tightfit.training.data.tokenizer import train_tokenizer
from tiny import allocator_peak, decoder

SHAPE = {"hidden_size": 32, "num_layers": 2}
BATCH = TokenBatch(2, 32, 600)
FIELDS = (
    "name", "fits", "peak_bytes", "needed_bytes", "step_seconds", "tokens_per_second", "longest_sequence",
    "largest_batch", "changes", "dtype", "trains", "optimizer", "levers",
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    """Fused AdamW in fp32 and in bf16 in a budget for which fp32 needs levers."""
    return tightfit.fit(decoder(**SHAPE), BATCH, device=even(), budget="1000KiB", optimizer="adamw_fused")


@pytest.mark.keeps("recipe-tightfit-fit-says")
@pytest.mark.slow  # 20 s: the levers of a whole table are searched
def test_no_levers_are_searched_for_a_recipe_whose_weights_alone_exceed_the_budget(monkeypatch):
    searched = []

    def searching(search, plain, **options):
        searched.append(search)
        return least_levers(search, plain, **options)

    monkeypatch.setattr(whole_step, "least_levers", searching)
    model = decoder(num_layers=6, hidden_size=64)
    held = sum(p.numel() for p in model.parameters()) * 4
    asked = {
        "batch": TokenBatch(8, 64, 600),
        "device": "rtx4090",
        "dtype": "fp32",
        "optimizer": "sgd",
        "precision": "fp32",
    }
    found = tightfit.fit(model, budget=held, **asked)
    assert not searched
    assert all(not row.fits and row.needed_bytes > held for row in found)
    near = next(row for row in found if row.name == "fp32 weights, SGD").needed_bytes
    step = {"device": "rtx4090", "optimizer": "sgd", "levers": "rounding"}
    least = tightfit.plan(model, asked["batch"], near, **step).peak_bytes
    assert held < least <= near, "what it needs is what a plan can take"
    tightfit.fit(model, budget=near // 2, **asked)
    assert searched


def test_every_recipe_that_fits_trains_in_the_bytes_that_were_predicted(found):
    assert {(outcome.recipe.dtype, outcome.fits) for outcome in found} >= {("fp32", True), ("bf16", True)}
    assert any(outcome.levers for outcome in found.fitting)
    for outcome in found.fitting:
        model, recipe = decoder(**SHAPE), outcome.recipe
        convert_weights(model, WEIGHT_DTYPES[recipe.dtype])
        with outcome.plan.apply(model):
            measured = allocator_peak(
                model, BATCH.tensors(), optimizer=optimizer_of(recipe), settings=StepSettings(recipe.precision),
                micro_batches=outcome.micro_batches,
            )  # fmt: skip
        assert outcome.peak_bytes == pytest.approx(measured, rel=1e-3)
        assert measured <= found.budget_bytes


@pytest.mark.slow  # a search beside every recipe
def test_a_longer_sequence_and_a_larger_batch_are_named(found):
    best = found.best
    assert best.longest_sequence.confirmed
    assert best.longest_sequence.value >= BATCH.length
    assert best.largest_batch.value >= BATCH.size
    longer = BATCH._replace(length=best.longest_sequence.value)
    model = decoder(**SHAPE)
    convert_weights(model, WEIGHT_DTYPES[best.recipe.dtype])
    how = {"device": even(), "optimizer": optimizer_of(best.recipe), "levers": "rounding"}
    assert tightfit.plan(model, longer, found.budget_bytes, **how).peak_bytes <= found.budget_bytes


def test_the_table_is_within_the_terminal_and_says_what_it_leaves_out(found):
    for width in (80, 120):
        lines = describe_recipes(found, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any("fp32 weights" in line for line in lines)
        assert sum(line.startswith(" ") and line.lstrip().startswith("changes ") for line in lines) == min(
            len(found), len(found.fitting) + NEAREST
        )
    assert "Left out, as the terminal is narrow: host, step." in describe_recipes(found, 80)
    assert "Left out" not in describe_recipes(found, 120)
    assert found.sentence in str(found).splitlines()[1]


def test_the_table_shows_what_fits_or_the_nearest_and_counts_the_rest():
    def of(fitting, others):
        rows = [outcome(Recipe(), 1.0)] * fitting
        rows += [Outcome(Recipe(), False, 10, 2**30 * (7 + n)) for n in range(others)]
        return RecipesRecord(tuple(rows), "RTX 4090", 2**30, "1 x 1,024 tokens", "llama")

    def rows(text):
        return [int(line.split()[0]) for line in text.splitlines() if re.match(r"\d+ .* weights", line)]

    text = describe_recipes(of(2, 20), 80)
    assert text.startswith("llama, 1 x 1,024 tokens:\n2 of 22 recipes fit")
    assert rows(text) == [1, 2, 3, 4, 5]
    assert text.index("\n2 ") < text.index("The nearest that do not fit") < text.index("\n3 ")
    assert "17 more do not fit: from 10.00 GiB. --all shows them." in text
    assert rows(describe_recipes(of(8, 20), 80)) == list(range(1, 12))
    for shown in (text, describe_recipes(of(8, 20), 80)):  # of one digit and of two
        lines = shown.splitlines()
        below = {line.index("changes ") for line in lines if line.startswith("   ") and "changes " in line}
        assert below == {next(line.index("recipe") for line in lines if line.lstrip().startswith("recipe"))}
    assert rows(describe_recipes(of(8, 20), 80, whole=True)) == list(range(1, 29))
    none = describe_recipes(of(0, 20), 80)
    assert none.index("The nearest") < none.index("\n1 ")
    assert rows(none) == [1, 2, 3]
    assert "more do not fit" not in describe_recipes(of(3, 2), 80)


def test_gradients_that_a_loop_keeps_stay_with_weights_in_another_dtype_too():
    model = decoder(**SHAPE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as `zero_grad(set_to_none=False)` leaves them
    row = tightfit.fit(model, BATCH, device=even(), budget="9MiB", dtype="bf16", optimizer="adamw").best
    narrow = decoder(**SHAPE)
    convert_weights(narrow, torch.bfloat16)
    assert row.peak_bytes == tightfit.estimate(narrow, BATCH, device=even(), keep_gradients=True).peak_bytes


def test_the_search_leaves_the_model_as_it_was():
    model = decoder(hidden_size=16, num_layers=1, vocab_size=64)
    before = {name: (p.data_ptr(), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    tightfit.fit(model, TokenBatch(1, 16, 64), device=even(), optimizer="sgd", dtype="fp32")
    assert {name: (p.data_ptr(), p.dtype, p.requires_grad) for name, p in model.named_parameters()} == before
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_asked_is_one_line():
    model = decoder(hidden_size=16, num_layers=1, vocab_size=64)
    with pytest.raises(BudgetError, match=r"0\.5x"):
        tightfit.fit(model, TokenBatch(1, 16, 64), device=even(), budget="0.5x")
    with pytest.raises(InputError, match="wanted a"):
        tightfit.fit(7)
    with pytest.raises(InputError, match="give a batch"):
        tightfit.fit(torch.nn.Linear(2, 2), device=even())


# The recipes that are tried


def test_the_recipes_that_everybody_uses_are_tried_on_a_card():
    tried = {recipe.name for recipe in recipes_for(lookup("rtx4090"), Wanted(), may_adapt=True)}
    assert tried >= {
        "LoRA r 16 on nf4, fused AdamW",
        "LoRA r 16 on bf16, fused AdamW",
        "bf16 weights, 8-bit AdamW",
        "bf16 weights, 8-bit AdamW, step in backward",
        "fp32 weights, bf16 autocast, fused AdamW",
    }


def test_a_card_without_products_in_bf16_computes_in_fp16():
    old = replace(lookup("rtx4090"), compute_capability=(7, 5))
    assert half_of(old) == "fp16"
    tried = recipes_for(old, Wanted(), may_adapt=True)
    assert all(recipe.dtype == "fp32" and recipe.precision != "bf16" for recipe in tried)


def test_what_is_settled_is_not_searched_and_clipping_excludes_steps_in_backward():
    wanted = Wanted(dtype="bf16", optimizer="adamw8bit", trains="all")
    tried = recipes_for(lookup("rtx4090"), wanted, may_adapt=True, clips=True)
    assert tried == [Recipe("bf16", optimizer="adamw8bit")]


# The order


def outcome(recipe, seconds, *, fits=True, needed=10):
    return Outcome(recipe, fits, 9, needed, step_seconds=seconds if fits else None)


def test_packages_that_are_not_installed_are_named_with_the_recipes_that_they_would_bring(monkeypatch):
    card = lookup("rtx4090")
    every = recipes_for(card, Wanted(), may_adapt=True)
    assert not_installed(card, Wanted(), may_adapt=True) == ()
    monkeypatch.setattr(choices, "find_spec", lambda name: None if name in ("bitsandbytes", "torchao") else name)
    left = recipes_for(card, Wanted(), may_adapt=True)
    (line,) = not_installed(card, Wanted(), may_adapt=True)
    count = len(every) - len(left)
    assert count == 14, "8-bit and 4-bit AdamW on three kinds of weights, in backward too; two bases of adapters"
    assert line == f"{count} further recipes with bitsandbytes and torchao: pip install 'tightfit[lowbit]'"
    assert not any("8-bit" in recipe.name or "nf4" in recipe.name for recipe in left)


def test_a_base_whose_package_is_not_installed_is_answered_with_its_name(monkeypatch):
    monkeypatch.setattr(choices, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))  # no decoder, so adapters may go on it
    with pytest.raises(InputError, match=r"no recipe is left to try: 1 further recipe with bitsandbytes: pip install"):
        tightfit.fit(model, TokenBatch(1, 8, 64), device="rtx4090", adapter=AdapterConfig(base="nf4"))


@pytest.mark.parametrize(
    ("asked", "clips", "may_adapt", "said"),
    [
        ({"optimizer": "muon"}, False, True, "muon updates no weight in backward"),
        ({"optimizer": "offloaded_adamw:0.5"}, False, True, "offloaded_adamw:0.5 updates no weight in backward"),
        ({"optimizer": "torch.optim:LBFGS"}, False, True, "torch.optim:LBFGS updates no weight in backward"),
        ({"precision": "fp16"}, False, True, "exclude each other"),
        ({"trains": "adapters"}, False, True, "where all weights are trained: leave it out"),
        ({"trains": "adapters"}, False, False, "adapters are for models of `transformers`: train all weights"),
        ({}, True, True, "clipping needs all gradients at once"),  # the step would be tried without clipping
    ],
)
def test_choices_that_exclude_each_other_are_named(asked, clips, may_adapt, said):
    wanted = Wanted(**asked, step_in_backward=True)
    assert recipes_for(lookup("rtx4090"), wanted, may_adapt=may_adapt, clips=clips) == []
    assert said in why_none(wanted, may_adapt=may_adapt, clips=clips)


def test_a_question_without_a_recipe_is_answered_with_the_reason():
    line = mistake("fit", "--model", "gpt2", "--device", "rtx3090", "--step-in-backward", "--optimizer", "muon")
    assert line == (
        "no recipe is left to try: muon updates no weight in backward: take another optimizer, or leave "
        "step_in_backward out"
    )


def test_the_order_weighs_what_changes_against_speed():
    full, low = Recipe("bf16", optimizer="adamw8bit"), Recipe("bf16", AdapterConfig(base="bf16"), precision="bf16")
    fast_low, slow_low = outcome(low, 0.5), outcome(low, 0.99)
    assert [o.recipe for o in ranked([outcome(full, 1.0), slow_low])] == [full, low]
    assert [o.recipe for o in ranked([outcome(full, 4.0), fast_low])] == [low, full]
    none = outcome(Recipe(), None, fits=False, needed=30), outcome(full, None, fits=False, needed=20)
    assert [o.needed_bytes for o in ranked([*none, fast_low])] == [10, 20, 30]


def test_a_recipe_that_another_one_beats_stands_behind():
    slow, fast = Recipe(optimizer="adamw"), Recipe(optimizer="adamw_fused")
    other = Recipe("bf16", AdapterConfig(base="nf4"), precision="bf16")
    order = ranked([outcome(slow, 1.0), outcome(fast, 0.9), outcome(other, 2.0)])
    assert [o.recipe for o in order] == [fast, other, slow]


# Written


@pytest.mark.parametrize(
    ("recipe", "model", "keys"),
    [
        (Recipe("bf16", optimizer="adamw8bit"), {"preset": "cpu8"}, {"dtype": "bf16"}),
        (
            Recipe("bf16", AdapterConfig(r=16, base="nf4"), "adamw_fused", precision="bf16"),
            {"path": "llama-3.1-8b"},
            {"dtype": "bf16", "path": "llama-3.1-8b"},
        ),
        (Recipe("bf16"), {"path": "llama-3.1-8b"}, {"dtype": "bf16", "random_init": True}),
    ],
)
def test_a_recipe_is_written_as_a_configuration(recipe, model, keys):
    made = Outcome(recipe, True, 8, 8, longest_sequence=LargestSize(64), micro_batches=2)
    text = written(made, WrittenSections(model, budget="8GiB", batch_size=4, sequence_length=512))
    config = parse_config(yaml.safe_load(text))
    assert {key: getattr(config.model, key, None) for key in keys if key != "preset"} == keys
    assert getattr(config.model, "adapter", None) == recipe.adapter
    assert (config.training.optimizer, config.training.precision) == (recipe.optimizer, recipe.precision)
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (4, 2)
    assert (config.memory.budget, config.memory.levers, config.training.grad_clip) == ("8GiB", "rounding", None)


@pytest.fixture
def weights(tmp_path):
    """The folder of a model with weights and a tokenizer."""
    save_model(decoder(**SHAPE), tmp_path / "weights")
    train_tokenizer(["the sky is blue"], 300).save(tmp_path / "weights")
    return tmp_path / "weights"


def test_weights_that_are_trained_on_keep_their_tokenizer_and_wait_for_their_users_data(weights):
    made = Outcome(Recipe("bf16"), True, 8, 8)
    setting = WrittenSections({"path": str(weights)}, device="rtx4090", vocabulary=600)
    config = parse_config(yaml.safe_load(written(made, setting)))
    assert (config.data.tokenizer, config.data.source) == ("model", "YOUR_DATA.jsonl")
    assert (config.training.device, config.training.learning_rate) == ("auto", 1e-5)
    plan, train = next_steps("run.yaml", made, setting)
    assert plan == "Its plan: tightfit plan run.yaml --device rtx4090"
    assert train == "Train: tightfit train run.yaml data.source=YOUR_DATA.jsonl"
    with pytest.raises(DataError, match=r"YOUR_DATA.jsonl': no such file"):
        tightfit.train(config)


def test_a_shape_without_weights_gets_a_tokenizer_of_its_own_and_says_that_it_begins_anew():
    setting = WrittenSections({"path": "llama-3.1-8b"}, vocabulary=128256)
    config = parse_config(yaml.safe_load(written(Outcome(Recipe("bf16"), True, 8, 8), setting)))
    assert (config.data.tokenizer, config.data.vocab_size, config.training.learning_rate) == ("auto", 6400, 1e-3)
    assert next_steps("run.yaml", Outcome(Recipe("bf16"), True, 8, 8), setting)[-1].startswith("It begins with new")
    adapted = Outcome(Recipe("bf16", AdapterConfig(base="nf4"), precision="bf16"), True, 8, 8)
    train = next_steps("run.yaml", adapted, setting)[-1]
    assert train == "Train: tightfit train run.yaml model.path=FOLDER data.source=YOUR_DATA.jsonl"


def test_a_tokenizer_is_not_trained_over_weights_that_are_loaded(weights):
    asked = {"model": {"path": str(weights)}, "data": {"tokenizer": "train"}}
    with pytest.raises(ConfigError, match="know other tokens: take theirs"):
        tightfit.train(parse_config(asked))
    (weights / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json: no such file"):
        tightfit.train(parse_config({"model": {"path": str(weights)}}))


# The command

TINY = """
model: {hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 300, max_position_embeddings: 64}
data: {sequence_length: 32, vocab_size: 300}
training: {batch_size: 2, grad_clip: null, device: rtx3060}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.mark.keeps("recipe-written-configuration-plan")
def test_the_command_answers_as_json_and_writes_a_recipe_that_has_the_same_plan(config, tmp_path):
    file = tmp_path / "run.yaml"
    asked = run("fit", config, "--optimizer", "adamw_fused", "--json", "--output", file)
    assert asked.code == 0
    recipes = json.loads(asked.out)["recipes"]
    assert all(set(FIELDS) <= recipe.keys() for recipe in recipes)
    assert recipes[0]["fits"]
    planned = json.loads(run("plan", file, "--json").out)
    assert (planned["peak_bytes"], planned["step_seconds"]) == (recipes[0]["peak_bytes"], recipes[0]["step_seconds"])


@pytest.mark.slow  # recipes are searched
def test_a_recipe_for_a_card_that_is_not_here_is_written_for_the_one_that_will_be(config, tmp_path):
    file = tmp_path / "run.yaml"
    asked = run("fit", config, "--device", "rtx4090", "--optimizer", "adamw_fused", "--output", file)
    assert parse_config(yaml.safe_load(file.read_text())).training.device == "auto"
    assert f"Its plan: tightfit plan {file} --device rtx4090" in asked.out
    planned = json.loads(run("plan", file, "--device", "rtx4090", "--json").out)
    assert planned["device"].endswith("RTX 4090")


@pytest.mark.slow  # the least of three recipes is searched
def test_where_nothing_fits_the_table_is_shown_and_the_exit_code_is_3(config):
    asked = run("fit", config, "--budget", "1KiB", "--optimizer", "adamw_fused")
    assert asked.code == 3
    assert "None of" in asked.error
    assert "needs" in asked.out


def test_options_settle_what_they_name_and_the_model_is_asked_about_without_them():
    question = Question(model="cpu8", device="rtx4090", dtype="bf16", step_in_backward=True, optimizer="adamw8bit")
    subject = recipe_subject(question)
    assert {p.dtype for p in subject.asked.model.parameters()} == {torch.float32}
    tried = recipes_for(lookup("rtx4090"), wanted(subject), may_adapt=True)
    assert tried == [Recipe("bf16", optimizer="adamw8bit", step_in_backward=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pick", "1"), "--output"),
        (("--tokens-per-step", "64", "--batch-size", "2"), "keep one"),
        (("--tokens-per-step", "33", "--seq-len", "32"), "multiple"),
        (("--budget", "0.5x"), "0.5x"),
        (("--precision", "fp8"), "precision"),
    ],
)
def test_a_wrong_option_is_one_line(config, arguments, message):
    assert message in mistake("fit", config, *arguments)


@pytest.mark.parametrize("name", ["adamw9bit", "offloaded_adamw:2", "muon8bits"])
def test_an_optimizer_that_is_not_known_is_one_line(name):
    with pytest.raises(InputError, match=f"^optimizer '{name}'"):
        tightfit.fit(decoder(**SHAPE), BATCH, device="rtx4090", optimizer=name)
    asked = run("fit", "--model", "cpu8", "--device", "rtx4090", "--optimizer", name)
    assert asked.code == 2
    assert asked.err.splitlines()[-1].startswith(f"error: optimizer '{name}'")


def test_a_batch_that_weights_in_bf16_do_not_take_says_what_to_use():
    model = nn.Sequential(nn.Linear(8, 8))
    asked = Request.of(model, (torch.zeros(2, 8),), loss=lambda model, batch: model(*batch).sum(), device="rtx4090")
    narrow = nn.Sequential(nn.Linear(8, 8)).to(torch.bfloat16)
    with pytest.raises(ModelError, match="which weights in bf16 do not take: use precision bf16 or fp32 weights"):
        with_recipe(asked, Recipe("bf16", precision="fp32"), narrow)
    assert with_recipe(asked, Recipe("bf16", precision="bf16"), narrow).model is narrow
