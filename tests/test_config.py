import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.errors import ConfigError
from tightfit.training.config import (
    DecoderConfig,
    PretrainedModel,
    RecomputeConfig,
    dump_config,
    load_config,
    parse_config,
)
from tightfit.training.config.aliases import ALIASES
from tightfit.training.config.document import configuration_page
from tightfit.training.config.schema import SECTIONS

ROOT = Path(__file__).parents[1]


def refused(raw, *overrides):
    """The text of the error, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, overrides, source="run.yaml")
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, "utf-8")
    return path


def test_an_empty_file_is_the_default_configuration(tmp_path):
    assert load_config(written(tmp_path, "")) == parse_config({})


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path):
    path = written(tmp_path, "training: {max_steps: 5, learning_rate: 1e-3}")
    config = load_config(path, ["training.max_steps=20", "lr=2e-4", "training.max_steps=30"])
    assert config.training.max_steps == 30
    assert config.training.learning_rate == 2e-4


def test_a_number_with_an_exponent_and_no_point_is_a_number(tmp_path):
    assert load_config(written(tmp_path, "training: {learning_rate: 3e-3}")).training.learning_rate == 3e-3


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"model": {"preset": "cpu26", "dropout": 0.1}, "memory": {"budget": "0.5x", "levers": ["recompute"]}},
        {"model": {"path": "somewhere", "random_init": True}},
        {"memory": {"recompute": {"blocks": "layers.*"}}, "output": {"folder": "1e3"}},
    ],
)
def test_a_dumped_configuration_loads_as_the_same(raw, tmp_path):
    config = parse_config(raw)
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_an_unknown_key_is_named_with_its_path_its_file_and_the_nearest_known_name():
    assert refused({"training": {"max_step": 3}}).startswith(
        "run.yaml: unknown key training.max_step: did you mean training.max_steps?"
    )


@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ({"trainin": {}}, "training"),
        ({"memory": {"recompute": {"block": "x"}}}, "memory.recompute.blocks"),
        ({"training": {"sequence_length": 3}}, "data.sequence_length"),
        ({"gradient_chekpointing": True}, "gradient_checkpointing"),
    ],
)
def test_the_nearest_name_is_found_in_the_section_elsewhere_and_among_aliases(raw, meant):
    assert f"did you mean {meant}?" in refused(raw)


def test_a_key_like_no_other_is_answered_with_what_there_is():
    assert "known are model, data, training, memory, output" in refused({"zzz": 1})


def test_an_unknown_key_is_told_before_a_wrong_value():
    text = refused({"training": {"max_steps": "many", "max_step": 3}})
    assert "unknown key training.max_step" in text
    assert "1 more" in text


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"training": {"max_steps": "many"}}, "training.max_steps is 'many' (text), wanted an integer"),
        ({"training": {"max_steps": True}}, "training.max_steps is True (true or false), wanted an integer"),
        ({"training": {"max_steps": 0}}, "training.max_steps is 0 (an integer), wanted greater than 0"),
        ({"model": {"hidden_size": "x"}}, "model.hidden_size is 'x' (text), wanted an integer"),
        ({"model": {"dropout": 1}}, "model.dropout is 1 (an integer), wanted less than 1"),
        ({"training": {"schedule": "linear"}}, "wanted 'cosine', 'wsd' or 'constant'"),
        ({"memory": {"levers": ["recompute", "magic"]}}, "memory.levers[1] is 'magic' (text), wanted 'recompute'"),
        ({"memory": {"levers": "magic"}}, "memory.levers is 'magic' (text), wanted 'exact' or 'rounding' or a list"),
        ({"memory": {"budget": 1.5}}, "memory.budget is 1.5 (a number), wanted an integer or text"),
        ({"memory": {"budget": "5 parsecs"}}, "memory.budget: budget '5 parsecs' is not an amount of memory"),
        ({"memory": {"recompute": 3}}, "memory.recompute is 3 (an integer), wanted a mapping"),
        ({"training": {"betas": [0.9]}}, "training.betas is (0.9,) (a list), which has too few or too many values"),
        ({"output": "runs/a"}, "output is 'runs/a', wanted a section, whose keys are output.folder, output.overwrite"),
        ({"training": {"output": "runs/a"}}, "unknown key training.output: did you mean a key of output?"),
        ([3], "holds [3], wanted the sections"),
    ],
)
def test_a_wrong_value_is_told_with_its_key_what_was_found_and_what_is_wanted(raw, expected):
    assert expected in refused(raw)


def test_an_error_names_the_override_it_comes_from_and_the_alias_as_written():
    text = refused({}, "max_iters=many")
    assert text.startswith("override max_iters=many: training.max_steps is 'many'")
    assert "written as max_iters" in text


@pytest.mark.parametrize("override", ["training.max_steps", "=3", ""])
def test_an_override_without_key_or_value_is_refused(override):
    assert "write key=value" in refused({}, override)


def test_a_missing_file_a_folder_and_bytes_are_refused_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text.* at byte 7"):
        load_config(tmp_path / "bytes.yaml")


def test_broken_yaml_is_told_with_line_and_column(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml, line 2, column \d+: not valid YAML"):
        load_config(written(tmp_path, "training:\n  max_steps: ]\n"))


def test_a_key_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"line 3, column 3: .*'max_steps' stands here twice"):
        load_config(written(tmp_path, "training:\n  max_steps: 3\n  max_steps: 4\n"))


def test_numbers_that_do_not_go_together_are_refused():
    assert "model.num_heads 3" in refused({"model": {"num_heads": 3}})
    assert "model.num_kv_heads 3" in refused({"model": {"num_kv_heads": 3}})
    assert "make model.head_dim even" in refused({"model": {"head_dim": 5}})
    assert "model.attention_dropout" in refused({"model": {"attention": "chunked", "attention_dropout": 0.1}})
    assert "gradient_accumulation_steps" in refused({"training": {"batch_size": 3, "gradient_accumulation_steps": 2}})
    assert "warmup_steps 9" in refused({"training": {"warmup_steps": 9, "max_steps": 5}})
    assert "data.sequence_length 5000" in refused({"data": {"sequence_length": 5000}})
    assert "memory.budget and memory.recompute exclude each other" in refused(
        {"memory": {"budget": "1GB", "recompute": {}}}
    )


def test_a_model_with_a_path_is_a_pretrained_one_and_takes_no_decoder_keys():
    assert parse_config({"model": {"path": "here"}}).model == PretrainedModel(path="here")
    assert "model.hidden_size does not apply" in refused({"model": {"path": "here", "hidden_size": 3}})
    assert "model.gguf_file applies only beside model.path" in refused({"model": {"gguf_file": "x"}})
    assert "model.preset and model.path" in refused({"model": {"path": "here", "preset": "cpu8"}})


def test_keys_beside_a_preset_win_and_unknown_presets_are_refused():
    assert parse_config({"model": {"preset": "cpu26", "num_layers": 2}}).model == DecoderConfig(
        hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2
    )
    assert "did you mean cpu26?" in refused({"model": {"preset": "cpu27"}})


def test_an_override_can_replace_a_whole_section_or_reach_inside_a_mapping():
    raw = {"model": {"hidden_size": 64}, "memory": {"recompute": {"segments": 2}}}
    config = parse_config(raw, ["model={path: here}", "memory.recompute.blocks=layers.*"])
    assert config.model == PretrainedModel(path="here")
    assert config.memory.recompute == RecomputeConfig(blocks="layers.*", segments=2)


@pytest.mark.parametrize("place", ["top", "model", "training"])
def test_an_alias_means_its_key_at_the_top_and_within_any_section(place):
    flat = {
        "n_layer": 3,
        "use_gradient_checkpointing": True,
        "use_mixed_precision": "fp16",
        "attention_type": "memory_efficient",
    }
    config = parse_config(flat if place == "top" else {place: flat})
    assert isinstance(config.model, DecoderConfig)
    assert config.model.num_layers == 3
    assert config.model.attention == "chunked"
    assert config.memory.recompute == RecomputeConfig()
    assert config.training.precision == "fp16"


@pytest.mark.parametrize(("value", "precision"), [(True, "bf16"), (False, "fp32"), ("no", "fp32"), ("bf16", "bf16")])
def test_mixed_precision_is_true_false_or_a_name(value, precision):
    assert parse_config({"mixed_precision": value}).training.precision == precision


def test_an_alias_with_a_value_it_does_not_know_is_refused():
    assert "use_mixed_precision is [1], wanted true or false" in refused({"use_mixed_precision": [1]})
    assert "training.gradient_checkpointing is 'x'" in refused({"training": {"gradient_checkpointing": "x"}})


def test_an_alias_that_contradicts_its_key_is_refused_and_one_that_agrees_is_not():
    text = refused({"lr": 1e-3, "training": {"learning_rate": 1e-2}})
    assert "lr and training.learning_rate both set training.learning_rate and contradict" in text
    assert parse_config({"lr": 1e-2, "training": {"learning_rate": 1e-2}}).training.learning_rate == 1e-2
    settings = {"use_gradient_checkpointing": True, "memory": {"recompute": {"blocks": "h.*"}}}
    assert parse_config(settings).memory.recompute == RecomputeConfig(blocks="h.*")
    assert "contradict" in refused(settings | {"use_gradient_checkpointing": False})


def test_every_alias_leads_to_a_key_that_exists():
    for alias in ALIASES.values():
        section, key = alias.key.split(".")
        assert key in SECTIONS[section], alias.name


@pytest.mark.keeps("configuration-page-table-permitted")
def test_the_page_of_the_documentation_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == configuration_page(), "run: python -m tightfit.training.config.document > docs/configuration.md"


def test_reading_a_configuration_needs_no_torch():
    program = "import sys, tightfit.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_quickstart_is_a_valid_configuration_at_half_the_plain_peak():
    config = load_config(ROOT / "examples" / "quickstart.yaml")
    assert config.memory.budget == "0.5x"
    assert config.data.source == "default"
