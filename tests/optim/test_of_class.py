"""Any optimizer of PyTorch's kind, named by its class: built, predicted, planned and trained as it is."""

import json
import re

import pytest
import yaml
from small_training import net, resumed_equals_uninterrupted

from command_line import mistake, tightfit
from tightfit.errors import ConfigError, InputError
from tightfit.levers.micro_batch import as_parts
from tightfit.names import facts_of, optimizer_class, parse_optimizer
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.api import plan
from tightfit.recipes.lines import lines_for
from tightfit.recipes.records import Recipe
from tightfit.step import model_loss
from tightfit.tracing.step import trace_step
from tightfit.training.api import train
from tightfit.training.config import TrainingConfig, parse_config
from tightfit.training.optimizer import OptimizerRecipe
from tiny import allocator_peak, decoder, token_batch

WITH_ARGUMENTS = "torch.optim:NAdam(lr=0.01, betas=(0.8, 0.9), foreach=True)"
CLASSES = ["torch.optim:RAdam", WITH_ARGUMENTS, "torch.optim:Rprop", "bitsandbytes.optim:Lion8bit", "signs:Signs"]
ASKED = ("--model", "cpu8", "--seq-len", 32, "--device", "rtx4090")
CORPUS = "".join(f"The house number {count} of the street has {count % 7} doors.\n" for count in range(120))


@pytest.mark.keeps("optimizer-class-predicted")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", CLASSES)
def test_the_predicted_peak_is_the_allocators(optimizer):
    model, batch = decoder(num_layers=2), token_batch(2, 16)
    predicted = trace_step(model, as_parts([batch], model_loss), model_loss, optimizer=optimizer).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, optimizer=optimizer), rel=1e-3)


@pytest.mark.keeps("optimizer-class-predicted")
def test_a_plan_of_it_has_the_peak_that_is_measured():
    model, batch = decoder(num_layers=4), token_batch(4, 96)
    found = plan(model, batch, "0.7x", optimizer="signs:Signs(momentum=0.5)", levers="exact")
    with found.apply(model):
        measured = allocator_peak(model, batch, optimizer="signs:Signs(momentum=0.5)")
    assert measured == found.peak_bytes <= found.budget_bytes


def test_it_trains_and_resumes_bit_for_bit():
    recipe = OptimizerRecipe(TrainingConfig(optimizer="signs:Signs(momentum=0.5)"))
    resumed_equals_uninterrupted(lambda model: recipe(model.parameters()), net)


def test_arguments_reach_the_class():
    group = build_optimizer(WITH_ARGUMENTS, net().parameters()).param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"]) == (0.01, (0.8, 0.9), True)


@pytest.mark.parametrize(
    "given",
    [
        {"class": "torch.optim:NAdam", "lr": 0.02, "betas": [0.8, 0.9]},
        {"class": "torch.optim:NAdam", "lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.3},
        "torch.optim:NAdam(lr=0.02, betas=(0.8, 0.9))",
    ],
    ids=str,
)
def test_a_configuration_takes_a_class_with_its_arguments(given):
    training = parse_config({"training": {"optimizer": given}}).training
    decay = 0.3 if isinstance(given, dict) and "weight_decay" in given else 0.1
    assert (training.learning_rate, training.weight_decay) == (0.02, decay)
    made = OptimizerRecipe(training)(net().parameters())
    assert {(g["lr"], tuple(g["betas"]), g["weight_decay"]) for g in made.param_groups} == {
        (0.02, (0.8, 0.9), decay),
        (0.02, (0.8, 0.9), 0.0),
    }
    assert parse_config({"training": training.model_dump()}).training == training


def test_a_class_without_weight_decay_gets_none():
    recipe = OptimizerRecipe(TrainingConfig(optimizer="signs:Signs"))
    assert ["weight_decay" in group for group in recipe(net().parameters()).param_groups] == [False]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lr": 0.1}, "needs the key class"),
        ({"class": "torch.optim:RAdam", "lr": 0.1}, "learning_rate 0.1 and learning_rate is 0.5"),
        ("torch.optim:RAdam(0.1)", "no key=value"),
        ("torch.optim:RAdam(lr=open('x'))", "no key=value"),
        ("adamww", "did you mean 'adamw'"),
    ],
)
def test_what_a_configuration_cannot_mean_is_one_line(given, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_config({"training": {"optimizer": given, "learning_rate": 0.5}})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("torch.optim:Nope", "Nope is not there in torch.optim"),
        ("signs:Function", "name a subclass of torch.optim.Optimizer"),
        ("os:system", "name a subclass of torch.optim.Optimizer"),
        ("no_such_package:Sgd", "cannot be imported"),
        ("torch.optim:Muon", "Muon only supports 2D parameters"),
        ("signs:Signs(beta=3)", "unexpected keyword argument 'beta'"),
    ],
)
def test_what_is_no_optimizer_of_these_weights_is_one_line(name, reason):
    with pytest.raises(InputError, match=rf"^optimizer {name.partition('(')[0]}.*{reason}"):
        build_optimizer(name, net().parameters())


def test_the_command_line_takes_it():
    options = ("--optimizer", "torch.optim:NAdam", "--optimizer-args", "lr=0.01,betas=(0.8,0.9),foreach=true")
    found = json.loads(tightfit("estimate", *ASKED, *options, "--json").out)
    same = json.loads(tightfit("estimate", *ASKED, "--optimizer", WITH_ARGUMENTS, "--json").out)
    assert found["optimizer"] == WITH_ARGUMENTS
    assert found["peak_bytes"] == same["peak_bytes"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--optimizer-args", "lr=1"), "give --optimizer module:Class too"),
        (("--optimizer", "adamw", "--optimizer-args", "lr=1"), "--optimizer torch.optim:AdamW"),
        (("--optimizer", "torch.optim:SGD", "--optimizer-args", "lr"), "'lr' is no key=value"),
        (("--optimizer", "torch.optim:LBFGS"), "LBFGS.step.. wants a closure"),
    ],
)
def test_options_that_cannot_be_meant_are_one_line(options, reason):
    assert re.search(reason, mistake("estimate", *ASKED, *options))


def test_a_training_that_needs_a_closure_is_refused_before_it_begins(tmp_path):
    with pytest.raises(InputError, match=r"LBFGS.step\(\) wants a closure"):
        train(training(tmp_path, optimizer="torch.optim:LBFGS"))


@pytest.mark.slow  # a training and its plan
def test_a_training_runs_with_it_within_its_budget(tmp_path):
    given = {"class": "signs:Signs", "momentum": 0.5, "lr": 0.01}
    result = train(training(tmp_path, memory={"budget": "0.9x", "max_slowdown": None}, optimizer=given))
    assert result.steps == 3
    assert result.measured_peak_bytes <= result.budget_bytes


def training(folder, memory=None, **keys):
    (folder / "corpus.txt").write_text(CORPUS)
    sizes = {"hidden_size": 32, "num_layers": 3, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 32}
    return parse_config(
        {
            "model": sizes,
            "data": {"source": str(folder / "corpus.txt"), "sequence_length": 32, "vocab_size": 300},
            "training": {"max_steps": 3, "batch_size": 8, "device": "cpu", **keys},
            "memory": memory or {},
            "output": {"folder": str(folder / "run")},
        }
    )  # fmt: skip


@pytest.mark.slow  # searches recipes
def test_fit_lists_it_and_its_lines_can_be_copied():
    recipes = json.loads(
        tightfit("fit", *ASKED, "--optimizer", WITH_ARGUMENTS, "--dtype", "fp32", "--precision", "fp32", "--json").out
    )["recipes"]
    assert {each["optimizer"] for each in recipes} == {WITH_ARGUMENTS}
    lines = lines_for(Recipe(), Recipe(optimizer=WITH_ARGUMENTS), budget="1GiB")
    assert yaml.safe_load(lines.yaml)["training"]["optimizer"] == WITH_ARGUMENTS
    assert lines.flags == f"--optimizer '{WITH_ARGUMENTS}'"
    assert "torch.optim.NAdam(model.parameters(), lr=0.01, betas=(0.8, 0.9), foreach=True)" in lines.python


def test_a_name_and_its_arguments_are_read_back():
    named = parse_optimizer(optimizer_class("my.optim:Own", {"lr": 0.1, "mode": "a,b"}))
    assert (named.kind, dict(named.arguments)) == ("my.optim:Own", {"lr": 0.1, "mode": "a,b"})
    assert (facts_of("my.optim:Own").home, facts_of("my.optim:Own").package) == ("my.optim", "my")
