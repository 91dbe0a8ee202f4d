import json

import pytest
import yaml

import models_by_name
import tightfit as package
from command_line import tightfit
from tightfit.planner.report.plan_tables import describe_plan
from tightfit.units import format_bytes

DECODER = ("--model", "models_by_name:decoder", "--batch-size", 4, "--seq-len", 64)
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """A small training, without a budget."""
    path = tmp_path / "training.yaml"
    model = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 128}
    path.write_text(yaml.safe_dump({"model": model, "data": {"sequence_length": 64, "vocab_size": 300}}))
    return path


def test_an_estimate_is_a_table_with_the_peak_first():
    lines = tightfit("estimate", *DECODER).out.splitlines()
    assert lines[1].startswith("Peak ")
    assert any(line.startswith("activations") for line in lines)


def test_an_estimate_as_json_has_the_field_names_of_python():
    figures = json.loads(tightfit("estimate", *DECODER, "--json").out)
    assert set(figures) >= {"peak_bytes", "step_seconds", "by_category", "peak_phase", "peak_module", "assumptions"}
    assert sum(figures["by_category"].values()) == figures["peak_bytes"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), {}),
        (("--micro-batches", 4), {"micro_batches": 4}),
        (("--optimizer", "sgd"), {"optimizer": "sgd"}),
        (("--precision", "bf16"), {"precision": "bf16"}),
        (("--batch-size", 8), {"size": 8}),
        (("--seq-len", 32), {"length": 32}),
    ],
    ids=str,
)
def test_the_options_describe_the_step(options, arguments):
    """As the arguments of `estimate` do, to the byte; each changes the peak, so that none may be read and left."""

    def estimated(size=4, length=64, **arguments):
        batch = package.TokenBatch(size, length, models_by_name.VOCABULARY)
        return package.estimate(models_by_name.decoder(), batch, **arguments).peak_bytes

    peak = json.loads(tightfit("estimate", *DECODER, *options, "--json").out)["peak_bytes"]
    assert peak == estimated(**arguments)
    assert not arguments or peak != estimated()


def test_options_beside_a_config_stand_for_its_keys(config):
    by_key = tightfit("estimate", config, "training.batch_size=2", "--json")
    assert tightfit("estimate", config, "--batch-size", 2, "--json").answer == by_key.answer
    assert tightfit("estimate", config, "--json").answer != by_key.answer


@pytest.mark.keeps("you-query-models-larger")
@pytest.mark.slow  # a model of many layers
def test_a_model_larger_than_any_memory_here_can_be_asked_about(tmp_path):
    path = tmp_path / "llama-8b.json"
    path.write_text(json.dumps(LLAMA))
    outcome = tightfit("estimate", "--model", path, "--seq-len", 2048, "--precision", "bf16", "--json")
    assert json.loads(outcome.out)["parameters"] == 8_030_261_248
    assert json.loads(outcome.out)["peak_bytes"] > 16 * 8_030_261_248 - 4 * 8_030_261_248  # weights and two states


def test_presets_and_functions_are_models():
    preset = json.loads(tightfit("estimate", "--model", "cpu8", "--seq-len", 16, "--json").out)
    assert preset["parameters"] > 5_000_000
    brings_its_batch = json.loads(tightfit("estimate", "--model", "models_by_name:image_model", "--json").out)
    assert brings_its_batch["by_category"]["inputs"] == 6 * 8 * 4


@pytest.fixture(scope="module")
def written_plan(tmp_path_factory):
    """The outcome of a plan, and the file that it was written to."""
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    return tightfit("plan", *DECODER, "--budget", "0.8x", "--output", file), file


def test_a_plan_fits_its_budget_and_says_so(written_plan):
    outcome, file = written_plan
    plan = package.Plan.from_json(file)
    assert outcome.code == 0
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert f"Fits: {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}" in outcome.out


def test_a_plan_as_json_is_what_output_writes(tmp_path):
    file = tmp_path / "plan.json"
    outcome = tightfit("plan", *DECODER, "--budget", "2x", "--output", file, "--json")
    assert json.loads(outcome.out) == json.loads(file.read_text())


@pytest.mark.slow  # a plan with its curve
def test_a_curve_is_asked_for_by_name_and_comes_as_table_json_picture_and_page(tmp_path):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    files = ("--html", page, "--png", picture)
    outcome = tightfit("plan", *DECODER, "--budget", "0.9x", "--curve", *files)
    assert "trade-off curve" in outcome.out
    assert "every second block recomputed" in outcome.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "every second block recomputed" in page.read_text()
    curve = json.loads(tightfit("plan", *DECODER, "--budget", "0.9x", "--curve", "--json").out)["curve"]
    assert curve["points"][0]["peak_bytes"] > curve["points"][-1]["peak_bytes"]


def test_an_estimate_is_a_page_and_a_picture_too(tmp_path):
    assert tightfit("estimate", *DECODER, "--html", tmp_path / "e.html", "--png", tmp_path / "e.png").code == 0
    assert (tmp_path / "e.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_keep_within_the_width_that_they_are_given(width, written_plan):
    lines = describe_plan(package.Plan.from_json(written_plan[1]), width).splitlines()
    assert max(map(len, lines)) <= width


def test_tables_are_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, tightfit("estimate", *DECODER).out.splitlines())) <= 60


@pytest.mark.slow  # a plan at the command line
def test_a_plan_for_a_config_takes_its_budget(config):
    plan = json.loads(tightfit("plan", config, "memory.budget=0.8x", "training.batch_size=2", "--json").out)
    assert plan["budget_bytes"] == int(0.8 * plan["plain_peak_bytes"])
    assert plan["peak_bytes"] <= plan["budget_bytes"]


def test_levers_are_named_with_commas(config):
    for asked in (DECODER, (config,)):
        outcome = tightfit("plan", *asked, "--batch-size", 2, "--budget", "0.97x", "--levers", "micro_batch", "--json")
        plan = json.loads(outcome.out)
        assert plan["micro_batches"] > 1
        assert all(choice["action"] == "keep" for choice in plan["choices"])


def test_a_model_without_repeated_blocks_is_planned_too():
    flat = ("--model", "models_by_name:Flat", "--batch-size", 2, "--seq-len", 64)
    outcome = tightfit("plan", *flat, "--budget", "0.9x", "--levers", "recompute,micro_batch")
    assert outcome.code == 0
    assert "The batch runs in 2 micro-batches" in outcome.out
    assert "plain, blocks at their" in outcome.out  # the whole model is its only block
