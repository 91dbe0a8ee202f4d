"""`plan --maximise`, and micro-batches that are counted by the plan, as a user asks for them."""

import json
from types import SimpleNamespace

import pytest
import yaml

from command_line import mistake, tightfit
from tightfit.cli import maximising
from tightfit.cli.asking import maximised_with
from tightfit.cli.question import Question

MODEL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 128}


BUDGET = ("--budget", "3MB", "memory.levers=exact")


@pytest.fixture
def config(tmp_path):
    """A small training."""
    path = tmp_path / "training.yaml"
    training, data = {"batch_size": 4}, {"sequence_length": 64, "vocab_size": 300}
    path.write_text(yaml.safe_dump({"model": MODEL, "data": data, "training": training}))
    return path


def settings(out):
    """The settings that the second line of an answer gives."""
    line = out.splitlines()[1]
    assert line.startswith("As settings: ")
    return dict(setting.split("=") for setting in line.removeprefix("As settings: ").split())


@pytest.mark.keeps("largest-sequence-batch-width")
@pytest.mark.slow  # a search for the largest value at the command line
@pytest.mark.parametrize(
    ("what", "key", "multiple"),
    [
        ("sequence_length", "data.sequence_length", 20),
        ("batch_size", "training.batch_size", 3),
        ("hidden_size", "model.hidden_size", 20),
    ],
)
def test_the_answer_is_a_plan_and_settings_that_have_it(config, what, key, multiple):
    outcome = tightfit("plan", config, *BUDGET, "--maximise", what, "--multiple-of", multiple)
    found = settings(outcome.out)
    assert outcome.out.startswith(f"The largest {what}, as a multiple of {multiple}, within 2.86 MiB is {found[key]}: ")
    assert int(found[key]) % multiple == 0
    again = tightfit("plan", config, *BUDGET, *(f"{name}={value}" for name, value in found.items()))
    fits = next(line for line in again.out.splitlines() if line.startswith("Fits: "))
    assert fits in outcome.out


@pytest.mark.slow  # long sequences
def test_a_sequence_longer_than_the_table_of_rotations_lengthens_it_and_json_says_what_is_above(config):
    ask = ("plan", config, *BUDGET, "training.batch_size=1", "--maximise", "sequence_length")
    found = settings(tightfit(*ask).out)
    assert found["model.max_position_embeddings"] == found["data.sequence_length"]
    assert int(found["data.sequence_length"]) > MODEL["max_position_embeddings"]
    as_json = json.loads(tightfit(*ask, "--json").out)
    assert as_json["value"] == int(found["data.sequence_length"])
    assert as_json["plan"]["peak_bytes"] <= 3_000_000 < as_json["above"]["least_bytes"]


@pytest.mark.slow  # the preset has 26 million parameters, and the curve many points
def test_a_preset_is_asked_about_and_a_plan_with_its_curve_written(tmp_path):
    file = tmp_path / "plan.json"
    ask = ("plan", "--model", "cpu8", "--budget", "145MB", "--maximise", "sequence_length", "--multiple-of", 512)
    outcome = tightfit(*ask, "--curve", "--output", file)
    assert settings(outcome.out)["training.batch_size"] == "1"
    assert "trade-off curve" in outcome.out
    assert json.loads(file.read_text())["peak_bytes"] <= 145_000_000


@pytest.mark.slow  # a search
def test_the_answer_says_with_which_weights_and_levers_it_is_and_where_others_stand():
    question = Question(model="mm26", device="rtx4090")
    found = SimpleNamespace(weights="fp32", optimizer="adamw")
    settings, with_what, others = maximised_with(question, found, ["recompute", "tile"])
    assert settings.startswith("As settings")
    assert with_what == "With fp32 weights, adamw, levers recompute, tile."
    assert others.endswith("tightfit fit --model mm26 --device rtx4090")
    assert maximised_with(Question(config="a.yaml"), found, None)[1:] == ["With fp32 weights, adamw, levers exact."]


@pytest.mark.slow  # two searches
def test_the_levers_that_are_named_are_those_of_the_search():
    asked = (
        "plan",
        "--model",
        "models_by_name:decoder",
        "--budget",
        "2MB",
        "--maximise",
        "batch_size",
        "--seq-len",
        64,
    )
    default = tightfit(*asked)
    assert "With fp32 weights, adamw, levers rounding." in default.out
    assert "chunked loss   not among the levers" not in " ".join(default.out.split())
    exact = tightfit(*asked, "--levers", "exact")
    assert "levers exact." in exact.out
    assert int(settings(default.out)["training.batch_size"]) >= int(settings(exact.out)["training.batch_size"])


@pytest.mark.slow  # a plan for each batch
def test_micro_batches_are_counted_by_the_plan(config):
    by_option = tightfit("plan", config, "--micro-batches", "auto", "--budget", "0.7x", "--json")
    by_key = tightfit("plan", config, "training.gradient_accumulation_steps=auto", "memory.budget=0.7x", "--json")
    plain = json.loads(tightfit("estimate", config, "--json").out)["peak_bytes"]
    for outcome in (by_option, by_key):
        plan = json.loads(outcome.out)
        assert plan["plain_peak_bytes"] == plain
        assert plan["peak_bytes"] <= int(0.7 * plain)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--maximise", "depth", "--budget", "6MB"), "'depth' is not known: choose one of sequence_length"),
        (("--maximise", "batch_size", "--budget", "0.5x"), "rises with the batch_size: give bytes"),
        (("--maximise", "batch_size"), "a plan needs a budget"),
        (
            ("--maximise", "batch_size", "--micro-batches", "auto", "--budget", "6MB"),
            "the largest batch_size and micro_batches auto exclude",
        ),
        (("--maximise", "hidden_size", "--multiple-of", "3", "--budget", "6MB"), "not a multiple of model.num_heads"),
        (("--multiple-of", "3", "--budget", "6MB"), "--multiple-of is for --maximise, which is not given"),
        (("training.gradient_accumulation_steps=auto",), "memory.budget, which is not given"),
        (("training.gradient_accumulation_steps=automatic",), "gradient_accumulation_steps is 'automatic'"),
    ],
)
def test_what_makes_no_sense_is_one_line(config, arguments, said):
    assert said in mistake("plan", config, *arguments)


def test_a_value_that_is_not_known_is_refused_before_a_model_is_built(monkeypatch):
    monkeypatch.setattr(maximising, "subject_of", None)
    said = mistake("plan", "--model", "llama-3.1-8b", "--maximise", "seq_len", "--budget", "6GB")
    assert "'seq_len' is not known: choose one of sequence_length" in said


@pytest.mark.slow  # a search; tests/planner/test_maximise.py asks for less
def test_not_even_the_smallest_is_exit_code_three(config):
    outcome = tightfit("plan", config, "--maximise", "sequence_length", "--budget", "100kB")
    assert outcome.code == 3
    assert "not even sequence_length 64 fits" in outcome.error


def test_a_count_that_is_none_is_a_usage_error():
    assert tightfit("plan", "--model", "cpu8", "--micro-batches", "0", "--budget", "1GB").code == 2
    assert tightfit("plan", "--model", "cpu8", "--micro-batches", "many", "--budget", "1GB").code == 2
