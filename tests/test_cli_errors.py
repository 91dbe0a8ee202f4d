"""The user's mistakes: one clear line on stderr (what, where, what to do) and the exit code that belongs to it."""

import errno
import json
import re

import pytest
import yaml

from command_line import mistake, tightfit
from models_by_name import decoder
from tightfit.cli import sources

DECODER = ("--model", "models_by_name:decoder", "--seq-len", 64)


@pytest.fixture
def config(tmp_path):
    """Writes a configuration with these sections laid over a small one, and gives its path."""

    def write(**sections):
        small = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "max_position_embeddings": 128}
        data = {"sequence_length": 32, "vocab_size": 300, "source": str(tmp_path / "text.txt")}
        (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        content = {"model": small, "data": data, "output": {"folder": str(tmp_path / "run")}}
        for name, keys in sections.items():
            content[name] = {**content.get(name, {}), **keys}
        path = tmp_path / "training.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def test_a_plan_without_a_budget_is_refused_before_its_model_is_built(monkeypatch):
    monkeypatch.setattr(sources, "build", None)
    for command in ("plan", "verify"):
        assert "a plan needs a budget: give --budget" in tightfit(command, "--model", "llama-3.1-8b").error


@pytest.mark.keeps("input-mistake-prints-line")
def test_an_unknown_key_is_answered_with_the_nearest_name(config):
    line = mistake("estimate", config(training={"batchsize": 3}))
    assert "unknown key training.batchsize: did you mean training.batch_size?" in line
    assert "training.yaml" in line


@pytest.mark.keeps("input-mistake-prints-line")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["estimate", "--model", "cpu8", "--seq-len", "-5"],
            r"invalid value for '--seq-len': .*: see {} estimate --help",
        ),
        (
            ["estimate", "--model", "cpu8", "--seq-len", "many"],
            r"invalid value for '--seq-len': .*: see {} estimate --help",
        ),
        (["estimate", "--sequence", "5"], r"no such option: --sequence.*: see {} estimate --help"),
        (["estimate", "--model"], r"option '--model' requires an argument: see {} estimate --help"),
        (["train"], r"missing argument 'CONFIG': see {} train --help"),
        (["runs", "show"], r"missing argument '.*': see {} runs show --help"),
        (["frobnicate"], r"no such command 'frobnicate': see {} --help"),
        (["--frobnicate"], r"no such option: --frobnicate: see {} --help"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_option_or_argument_is_a_line_and_no_box(arguments, line):
    outcome = tightfit(*arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert re.fullmatch(line.format("tightfit"), outcome.error), outcome.error


def test_no_command_at_all_shows_the_help():
    outcome = tightfit()
    assert "Usage: tightfit" in outcome.out + outcome.err


def test_a_value_of_the_wrong_type_is_shown_with_what_is_wanted(config):
    line = mistake("estimate", config(training={"batch_size": "many"}))
    assert "training.batch_size is 'many' (text), wanted an integer" in line


def test_a_wrong_override_is_named_as_it_was_written(config):
    assert mistake("estimate", config(), "training.batch_size=x").startswith("override training.batch_size=x: ")
    assert "write key=value" in mistake("estimate", config(), "batch_size")


def test_a_missing_configuration(tmp_path):
    assert mistake("estimate", tmp_path / "none.yaml").endswith("no such file: give the path of a YAML configuration")


def test_neither_or_both_of_config_and_model():
    assert "give a CONFIG, or --model" in mistake("estimate")
    assert "both given" in mistake("estimate", "some.yaml", *DECODER)


def test_a_sequence_longer_than_the_positions(config):
    assert "longer than model.max_position_embeddings 128" in mistake("estimate", config(), "--seq-len", 256)
    assert "--seq-len 256 is longer than the 128 positions" in mistake("estimate", *DECODER, "--seq-len", 256)


def test_a_budget_that_nothing_fits_has_its_own_exit_code_and_names_the_least():
    line = mistake("plan", *DECODER, "--budget", "1KB", code=3)
    assert line.startswith("1000 B cannot fit: the least is ")
    assert " bytes), reached by " in line


def test_a_budget_in_unknown_units(config):
    for asked in (DECODER, (config(),)):
        line = mistake("plan", *asked, "--budget", "3parsec")
        assert "'3parsec' is not an amount of memory: write a number and one of B, KB, MB" in line


def test_a_plan_without_a_budget(config):
    assert "a plan needs a budget" in mistake("plan", *DECODER)
    assert "a plan needs a budget" in mistake("plan", config())


def test_levers_and_precisions_and_optimizers_and_devices_that_are_not_there():
    assert "lever 'magic' is not known" in mistake("plan", *DECODER, "--budget", "0.9x", "--levers", "magic")
    assert "precision 'fp8' is not known" in mistake("estimate", *DECODER, "--precision", "fp8")
    assert "optimizer 'lion' is not known" in mistake("estimate", *DECODER, "--optimizer", "lion")
    assert "device 'tpu' is not known" in mistake("estimate", *DECODER, "--device", "tpu")


def test_blocks_that_match_nothing():
    assert "'blocks.*'" in mistake("plan", *DECODER, "--budget", "0.8x", "--blocks", "blocks.*")


def test_a_model_that_cannot_be_found():
    assert "did you mean cpu26?" in mistake("estimate", "--model", "cpu62")
    assert "no such folder, file, preset" in mistake("estimate", "--model", "nowhere/at/all")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no_such_module:f", "the module 'no_such_module' cannot be imported (ModuleNotFoundError: "),
        ("models_by_name:nothing", "nothing is not there in models_by_name"),
        ("models_by_name:a_number", "a_number is a int in models_by_name"),
        ("models_by_name:not_a_module", "returned a dict, wanted a torch.nn.Module"),
        ("models_by_name:broken", "raised RuntimeError: the weights are lost"),
        ("models_by_name:without_embedding", "Linear has no embedding to make token ids for"),
    ],
)
def test_a_function_that_gives_no_model(source, said):
    assert said in mistake("estimate", "--model", source)


def test_a_batch_that_the_model_rejects_is_told_in_the_models_own_words():
    line = mistake("estimate", "--model", "models_by_name:Picky", "--batch-size", 3, "--seq-len", 8)
    assert "models_by_name:Picky (Picky) rejects the batch (3 x 8 tokens)" in line
    assert line.endswith("ValueError: at most two at a time, please")


def test_what_a_model_says_is_shortened_where_it_writes_itself_out():
    line = mistake("estimate", "--model", "models_by_name:Wordy", "--seq-len", 8)
    assert "models_by_name:Wordy (Wordy) rejects the batch (1 x 8 tokens): TypeError: Wordy(" in line
    assert line.endswith("got multiple values for keyword argument 'input_ids'")
    assert len(line) < 1100


@pytest.mark.keeps("internal-error-never-reported")
def test_an_error_of_ours_is_not_called_the_models(monkeypatch):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("tightfit.planner.estimates.step_figures", fails)
    with pytest.raises(ZeroDivisionError):
        tightfit("estimate", *DECODER)


def test_a_plan_that_cannot_be_written(tmp_path):
    line = mistake("plan", *DECODER, "--budget", "2x", "--output", tmp_path / "none" / "plan.json")
    assert line.endswith("the plan cannot be written: No such file or directory")


def test_a_run_that_is_not_there(tmp_path):
    assert "give the folder of a finished run" in mistake("generate", tmp_path / "none", "--prompt", "def")


def test_a_file_that_is_no_plan(tmp_path):
    for content, said in (("[1]", "a list, wanted a mapping"), ("{", "Expecting property name"), ("{}", "format None")):
        (tmp_path / "plan.json").write_text(content)
        line = mistake("verify", *DECODER, "--plan", tmp_path / "plan.json")
        assert "plan.json: not a plan that this version of tightfit wrote (" in line
        assert said in line
    assert "the plan cannot be read: Is a directory" in mistake("verify", *DECODER, "--plan", tmp_path)


@pytest.mark.parametrize("norm", ["nan", "-1", "0"])
def test_a_norm_that_gradients_cannot_be_clipped_to(norm):
    line = mistake("estimate", *DECODER, "--grad-clip", norm)
    assert f"grad_clip is {float(norm)!r}, wanted a number above zero" in line


@pytest.mark.parametrize("number", [".nan", ".inf", "-1.0"])
def test_a_learning_rate_is_a_finite_number_above_zero(config, number):
    path = config()
    path.write_text(path.read_text().replace("data:", f"training: {{learning_rate: {number}}}\ndata:"))
    assert "training.learning_rate is " in mistake("train", path)


def test_a_seed_that_is_none(tmp_path):
    for seed in (-1, 2**63):
        assert tightfit("generate", tmp_path, "--prompt", "x", "--seed", seed).code == 2


def test_an_optimizer_for_bf16_weights_is_refused_where_they_are_fp32():
    line = mistake("estimate", *DECODER, "--optimizer", "adamw_bf16")
    assert line.startswith("optimizer adamw_bf16 is for bf16 weights, and none that is trained here is bf16")


@pytest.mark.keeps("wrong-argument-api-loss")
def test_a_disk_without_room_is_one_line(monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tightfit.cli.asking.show", full)
    line = mistake("estimate", *DECODER)
    assert line == "where the output goes: No space left on device: make room, or write to another disk"


def test_debug_shows_where_an_error_comes_from():
    from tightfit.errors import ModelError

    for args in (("--debug", "estimate", "--model", "cpu62"), ("estimate", "--model", "cpu62", "--debug")):
        with pytest.raises(ModelError):
            tightfit(*args)


def test_usage_errors_have_exit_code_2():
    for args in (("pln",), ("plan", "--budgets", "3GB"), ("plan", "--batch-size", "0"), ("generate", "run")):
        assert tightfit(*args).code == 2
    assert "plan" in tightfit("pln").err


def test_json_on_stdout_is_left_alone_by_notices():
    outcome = tightfit("estimate", *DECODER, "--json")
    assert json.loads(outcome.out)["peak_bytes"] > 0


def test_errors_about_a_model_name_the_option_that_was_written_and_not_all_architectures(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "no-such-kind", "hidden_size": 8}')
    error = tightfit("estimate", "--model", path).error
    assert "--model" in error
    assert "model.path" not in error
    assert "no-such-kind" in error
    assert len(error) < 600
    path.write_text('{"hidden_size": 8}')
    error = tightfit("estimate", "--model", path).error
    assert "model_type" in error
    assert len(error) < 600


def test_an_unknown_model_type_and_heads_that_do_not_divide_are_said_in_our_words(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "lamma", "hidden_size": 8}')
    error = tightfit("estimate", "--model", path).error
    assert re.search(r"transformers \d[\d.]+ knows no model_type 'lamma': did you mean llama\? Else update it", error)
    shape = {"hidden_size": 100, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 64}
    path.write_text(json.dumps({"model_type": "llama", **shape}))
    error = tightfit("estimate", "--model", path).error
    assert "its config holds what cannot be: The hidden size (100) is not a multiple of" in error


def test_a_default_that_is_too_long_is_not_said_to_be_the_readers():
    asked = ("estimate", "--model", "models_by_name:decoder")
    most = f"positions of Decoder: give at most {decoder().config.max_position_embeddings}"
    assert most in mistake(*asked, "--seq-len", 4096)
    assert mistake(*asked).startswith("the default --seq-len 1024 is longer than")


def test_a_budget_that_is_none_is_refused_before_a_model_is_built(monkeypatch):
    monkeypatch.setattr(sources, "build", None)
    for command in ("plan", "verify", "fit"):
        assert "'banana' is not an amount of memory" in tightfit(command, "--model", "cpu8", "--budget", "banana").error
