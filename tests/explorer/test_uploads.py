"""Uploads are data of strangers: what they name is neither opened nor run, and what is too large is refused."""

import json

import pytest

from tightfit.cli.explorer import writing
from tightfit.cli.explorer.limits import UPLOAD_BYTES
from tightfit.cli.explorer.question import PageQuestion
from tightfit.cli.explorer.uploads import Upload, read_upload
from tightfit.errors import InputError, TightfitError
from tightfit.training.config.load import parse_config
from tightfit.training.config.yaml_text import parse_yaml

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


def read(text, name="run.yaml"):
    return read_upload(Upload.of(name, text.encode()))


@pytest.mark.keeps("code-upload-run-path")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (BOMB, "line 1: anchors, aliases and tags are not taken here"),
        ("model: !!python/object/apply:os.system [id]", "anchors, aliases and tags"),
        ("model: " + "[" * 100_000, "nested too deeply"),
        ("- 1\n- 2", "holds no sections"),
        ("model: {path: /etc}", "it reads no folders and no hub: upload the model's config.json"),
        ("model: {path: ./gpt2}", "it reads no folders and no hub"),
        ("model: {path: 'os:getcwd'}", "it reads no folders and no hub"),
        ("model: {path: whisper-tiny}", "is no published model that this page knows"),
        ("model: {path: gpt2, gguf_file: x.gguf}", "is not read here"),
        ("model: {num_layers: 100000}", "num_layers 100,000 is more than the 256"),
        ("model: {nosuch: 1}", "nosuch"),
        ("model: [", "not valid YAML"),
    ],
    ids=lambda text: text[:24],
)
def test_a_yaml_that_could_do_harm_is_refused_in_one_line(text, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(InputError) as caught:
        read(text)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"hidden_act": "owner/kernels"}, "hidden_act is 'owner/kernels', which may name a file or code"),
        ({"rope_scaling": {"rope_type": "module:function"}}, "rope_type is 'module:function'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1,000,000 is more than the 256"),
        ({"num_local_experts": 10**5}, "num_local_experts 100,000 is more than the 1,024"),
        ({"vocab_size": 10**12}, "more than the 16,777,216"),
        ({"layer_types": ["full_attention"] * 2000}, "layer_types has 2,000 items"),
        ({"model_type": 7}, "has no model_type"),
    ],
)
def test_a_config_json_that_could_do_harm_is_refused_in_one_line(fields, line):
    with pytest.raises(InputError) as caught:
        read(json.dumps(LLAMA | fields), "config.json")
    assert line in str(caught.value)


def test_deep_json_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"nested too deeply|not valid JSON"):
        read("[" * 200_000, "config.json")


def test_fields_that_make_transformers_load_something_are_left_out():
    loading = {
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "_attn_implementation": "owner/kernel",
        "quantization_config": {"quant_method": "gptq"},
        "_name_or_path": "/etc/passwd",
    }
    reading = read(json.dumps(LLAMA | loading), "config.json")
    assert reading.described.fields == LLAMA
    assert all(name in reading.notes[0] for name in loading)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("run.yaml", b"x" * (UPLOAD_BYTES + 1), "a configuration has at most 262,144"),
        ("model.py", b"import os", "is not a configuration"),
        ("run.yaml", b"\xff\xfe", "not UTF-8"),
        ("../../<b>\n.exe", b"", r"<b>?.exe is not a configuration"),
    ],
)
def test_other_files_are_refused_by_name(name, content, line):
    with pytest.raises(InputError) as caught:
        Upload.of(name, content)
    assert line in str(caught.value)


def test_a_yaml_fills_the_fields_and_what_it_names_on_disk_is_not_read():
    reading = read(
        "model: {path: meta-llama/Llama-3.2-1B, adapter: {r: 4, target_modules: [q_proj, v_proj], base: nf4}}\n"
        "data: {source: /etc/passwd, sequence_length: 512}\n"
        "training: {batch_size: 4, precision: bf16, device: h200, optimizer: adamw8bit}\n"
        "memory: {budget: 20GiB}\n"
    )
    question = PageQuestion.of(dict(reading.values))
    assert (question.sequence_length, question.batch_size, question.device) == (512, 4, "h200")
    assert (question.rank, question.targets, question.base, question.budget) == (4, "q_proj+v_proj", "nf4", "20GiB")
    assert reading.described.path == "meta-llama/Llama-3.2-1B"
    assert reading.notes == ("run.yaml: not read here: data.source",)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sequence_length": 2**20, "batch_size": 2}, "are more than the 1,048,576"),
        ({"sequence_length": 0}, "sequence 0 is less than 1"),
        ({"sequence_length": None}, "sequence length is empty"),
        ({"batch_size": 1.5}, "batch size is 1.5: give a whole number"),
        ({"batch_size": float("inf")}, "batch size is inf"),
        ({"model": "os:getcwd"}, "is none of the list"),
        ({"model": "/etc"}, "is none of the list"),
        ({"model": "vit-base-patch16-224"}, "is none of the list"),
        ({"device": "cpu"}, "is no card that this page knows"),
        ({"device": ["h200"]}, "device is no text"),
        ({"optimizer": "adamv"}, "did you mean"),
        ({"optimizer": "torch.optim:RAdam"}, "is no name of the list"),
        ({"precision": "int3"}, "precision 'int3' is not known"),
        ({"rank": 10**6}, "rank 1000000 is not from 0"),
        ({"budget": "lots"}, "lots"),
        ({"budget": "9" * 500}, "at most 200"),
    ],
)
def test_a_wrong_field_is_one_line(values, line):
    with pytest.raises(TightfitError) as caught:
        PageQuestion.of(values)
    assert line in str(caught.value)


@pytest.mark.keeps("page-shows-figures-estimate")
@pytest.mark.parametrize(
    "question",
    [
        PageQuestion(),
        PageQuestion(model="cpu8", dtype="bf16", step_in_backward=True, levers="rounding+offload"),
        PageQuestion(model="llama-3.1-8b", rank=16, targets="q_proj+v_proj", budget="20GiB"),
        PageQuestion(upload=Upload("config.json", json.dumps(LLAMA))),
        PageQuestion(upload=Upload("run.yaml", "model: {hidden_size: 64, num_layers: 2}")),
    ],
)
def test_the_yaml_to_copy_is_a_configuration_of_the_same_step(question):
    described = question.described
    config = parse_config(parse_yaml(writing.yaml_text(question, described), "run.yaml"))
    assert config.training.optimizer == question.optimizer
    assert config.data.sequence_length == question.sequence_length
    assert config.memory.budget == question.budget
    assert config.training.step_in_backward == question.step_in_backward
    if described.decoder is not None:
        assert (config.model.hidden_size, config.model.num_layers) == (
            described.decoder.hidden_size,
            described.decoder.num_layers,
        )
    compile(writing.python_text(question, described), "step.py", "exec")
