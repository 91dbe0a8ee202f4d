"""Quantised models: what torchao alone computes, in a folder that is read back bit for bit, at the size said."""

import importlib.metadata
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torchao.quantization as ao
from torch import nn
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

import tightfit as package
from command_line import tightfit
from tightfit.errors import InputError, ModelError, QualityError, SourceError
from tightfit.memory.allocator import measured_peak, storage_bytes
from tightfit.models.compress.quantising import calibrated, check_quality, choose_layers
from tightfit.models.compress.source import open_source
from tightfit.models.dtypes import convert_weights
from tightfit.models.export import export_model
from tightfit.models.generation import generate
from tightfit.models.loading import build_model
from tightfit.models.quantised import load_quantised, parameters_without_memory
from tightfit.models.saving import load_model, save_model
from tightfit.ops.weights import torchao_weights
from tightfit.ops.weights.torchao_weights import parts_of, quantise_layers, weight_of
from tightfit.training.config import PretrainedModel
from tightfit.training.data.tokenizer import train_tokenizer
from tiny import decoder

TEXT = "Memory is what a training has least of. A tensor that nobody needs is a tensor that nobody should keep. " * 8
METHODS = ("int8", "int8_dynamic", "int8_static", "int4")
IDS = torch.arange(60).view(3, 20)


def learnt():
    """A decoder that knows a text: any other weights know it less well."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([TEXT], 300)
    model = decoder(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=304, max_position_embeddings=64
    )
    ids = torch.tensor(tokenizer.encode(TEXT))
    rows = ids[: len(ids) // 32 * 32].view(-1, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A decoder's folder, the same model as a Llama of `transformers`, a text, and the decoder quantised to int8."""
    root = tmp_path_factory.mktemp("quantised")
    model, tokenizer = learnt()
    save_model(model, root / "run")
    tokenizer.save(root / "run")
    (root / "text.txt").write_text(TEXT)
    open_source(root / "run").write(model, root / "llama")
    report = package.quantise(root / "run", to="int8", output=root / "int8", text=root / "text.txt", seq_len=24)
    return SimpleNamespace(
        root=root, run=root / "run", llama=root / "llama", text=root / "text.txt", int8=root / "int8", report=report
    )


def by_torchao_alone(model, method, rows):
    """What a user of torchao writes; the settings of the compiler, which take seconds to import, left alone."""
    configs = {
        "int8": ao.Int8WeightOnlyConfig(set_inductor_config=False),
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int4": PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False),
    }
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("head")}
    if method != "int8_static":
        ao.quantize_(model, configs[method], filter_fn=lambda module, name: name in layers)
        return model
    largest = {}
    for name, layer in layers.items():

        def seen(module, inputs, name=name):
            largest[name] = max(largest.get(name, 0.0), inputs[0].abs().max().item())

        layer.register_forward_pre_hook(seen)
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None])
    for name, layer in layers.items():
        layer._forward_pre_hooks.clear()
        scale = torch.full((1, 1, 1), largest[name], dtype=torch.float32) / 127.5  # 255 steps between -128 and 127
        granularity = [ao.PerTensor(), ao.PerRow()]
        config = ao.Int8StaticActivationInt8WeightConfig(scale, granularity=granularity, set_inductor_config=False)
        ao.quantize_(layer, config)
    return model


def expected_bytes(model, method):
    """Bytes of all tensors, from shapes alone."""
    total = 0
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            rows, is_linear = parameter.shape[0], type(module) is nn.Linear and name == "weight"
            if not is_linear or rows == 304:  # the head, which is the embedding
                total += 0 if is_linear else parameter.numel() * (2 if method == "int4" else 4)
            elif method == "int4":
                total += parameter.numel() // 2 + parameter.numel() // 32 * 2 * 2
            else:
                total += parameter.numel() + rows * (4 + 1) + 4 * (method == "int8_static")
    return total


def measured(model, ids, new_tokens):
    resident = [*model.parameters(), *model.buffers(), ids]
    return measured_peak(lambda: generate(model, ids, max_new_tokens=new_tokens, temperature=0), resident)


SLOW = pytest.mark.slow  # the same weights once more, in other modules: two seconds each


@pytest.mark.keeps("quantised-model-computes-torchao")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "method"),
    [*(("run", method) for method in METHODS), ("llama", "int8_static"), pytest.param("llama", "int8", marks=SLOW),
     pytest.param("llama", "int8_dynamic", marks=SLOW), pytest.param("llama", "int4", marks=SLOW)],
)  # fmt: skip
def test_a_quantised_model_is_torchaos_and_reads_back_bit_for_bit_at_the_size_that_is_said(
    folders, tmp_path, kind, method
):
    source = open_source(getattr(folders, kind))
    plain, model = source.model(), source.model()
    rows = IDS if method == "int8_static" else None
    alone = source.model()
    if method == "int4":
        convert_weights(model, torch.bfloat16)
        convert_weights(alone, torch.bfloat16)
    paths = choose_layers(model, method).paths
    assert len(paths) == 14  # 7 in each of 2 blocks: the head stays
    quantise_layers(model, method, paths, None if rows is None else calibrated(model, paths, rows))
    by_torchao_alone(alone, method, rows)
    calibration = {"calibration": folders.text} if method == "int8_static" else {}
    output, report = folders.int8, folders.report
    if (kind, method) != ("run", "int8"):
        output = tmp_path / "out"
        options = {"text": folders.text, "seq_len": 24, "force": True, **calibration}
        report = package.quantise(getattr(folders, kind), to=method, output=output, **options)
    read = load_model(output)

    with torch.no_grad():
        wanted = model(IDS).logits
        assert torch.equal(alone(IDS).logits, wanted)
        assert not torch.equal(plain(IDS).logits, wanted)
        if method != "int8_static":  # whose scales here are of other rows
            assert torch.equal(read(IDS).logits, wanted)
    assert parts_equal(read, model, but="act_quant_scale")
    said = report.after
    held = storage_bytes(list(read.parameters()))
    assert held == expected_bytes(plain, method)
    assert held < said.disk_bytes < held + 12_000  # and the names of tensors
    assert said.inference_peak_bytes == pytest.approx(said.measured_inference_peak_bytes, rel=0.001)
    assert report.peak_bytes == pytest.approx(report.measured_peak_bytes, rel=0.001)
    assert storage_bytes(plain.parameters()) * 0.5 < report.peak_bytes < storage_bytes(plain.parameters()) * 1.6
    assert said.inference_peak_bytes < report.before.inference_peak_bytes * 0.7
    assert said.parameters == report.before.parameters == sum(p.numel() for p in plain.parameters())
    assert report.before.perplexity * 0.9 < said.perplexity < report.before.perplexity * 1.5
    record = json.loads((output / "quantisation.json").read_text())
    assert (record["method"], record["versions"]["torchao"]) == (method, importlib.metadata.version("torchao"))
    assert [*record["source"]["sha256"]] == ["model.safetensors"]
    assert len(record["layers"]) == 14
    assert not [path for path in output.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]


def parts_equal(one, other, but):
    """Whether all tensors of two models are equal, those within quantised weights too."""
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        mine, theirs = parts_of(parameter), parts_of(others[name])
        if mine is None or theirs is None:
            assert (mine, theirs) == (None, None), name
            assert torch.equal(parameter, others[name]), name
            continue
        assert mine.described == theirs.described
        assert all(torch.equal(mine.tensors[part], theirs.tensors[part]) for part in mine.tensors if part != but), name
    return True


@pytest.mark.keeps("generate-score-estimate-inference")
def test_commands_read_a_quantised_folder(folders, tmp_path):
    scored = json.loads(tightfit("score", folders.int8, "--file", folders.text, "--max-tokens", 24, "--json").out)
    assert scored["tokens"] == 23
    ids = torch.tensor(open_source(folders.run).tokenizer.encode(TEXT)[:24])
    assert scored["perplexity"] == pytest.approx(package.score(load_quantised(folders.int8), ids).perplexity, rel=1e-6)
    assert tightfit("generate", folders.int8, "--prompt", "Memory is", "--max-new-tokens", 3).code == 0
    options = ("--inference", "--seq-len", 24, "--new-tokens", 4, "--batch-size", 2, "--json")
    found = json.loads(tightfit("estimate", "--model", folders.int8, *options).out)
    read = load_quantised(folders.int8)
    ids = torch.arange(48).view(2, 24)
    assert found["peak_bytes"] == pytest.approx(measured(read, ids, 4), rel=0.001)

    printed = tightfit("quantise", folders.llama, "--to", "int8", "--text", folders.text, "--seq-len", 16,
                       "--output", tmp_path / "out", "--json")  # fmt: skip
    said = json.loads(printed.out)
    assert said["after"]["disk_bytes"] == (tmp_path / "out" / "quantised.safetensors").stat().st_size
    assert "the output head" in " ".join(said["notes"])
    assert tightfit("generate", tmp_path / "out", "--prompt", "Memory", "--max-new-tokens", 2).code == 0


@pytest.mark.keeps("generate-score-estimate-inference")
def test_what_quantised_weights_are_not_for_is_refused_by_name(folders, tmp_path):
    for arguments in (("estimate", "--model", folders.int8), ("plan", "--model", folders.int8, "--budget", "0.5x")):
        assert "is quantised (int8): it is for generate" in tightfit(*arguments, "--seq-len", 8).error
    again = tightfit("quantise", folders.int8, "--to", "int4", "--output", tmp_path / "out")
    assert again.code == 2
    assert "is quantised already" in again.error
    exported = tightfit("export", folders.int8, "--output", tmp_path / "out")
    assert "has quantised weights" in exported.error
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelError, match="is quantised"):
        build_model(PretrainedModel(path=str(folders.int8)))


@pytest.mark.keeps("perplexity-rises-more-allowed")
def test_too_great_a_loss_is_refused_and_leaves_nothing_unless_forced(folders, tmp_path, tmp_path_factory):
    model = load_model(folders.run)
    for block in model.layers:
        # Large weights that nothing reaches take the codes from the 31 others of their groups.
        for norm in (block.attention_norm, block.mlp_norm):
            norm.weight.data[::32] = 0
        attention, mlp = block.attention, block.mlp
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            layer.weight.data[:, ::32] = 100
    source = tmp_path_factory.mktemp("sensitive")
    save_model(model, source)
    shutil.copy(folders.run / "tokenizer.json", source)
    options = ("quantise", source, "--to", "int4", "--text", folders.text, "--seq-len", 24)
    refused = tightfit(*options, "--output", tmp_path / "out")
    assert refused.code == 2
    assert "perplexity rises by" in refused.error
    assert not list(tmp_path.iterdir())
    forced = tightfit(*options, "--output", tmp_path / "out", "--force")
    assert forced.code == 0
    assert "written by force" in forced.out
    assert load_model(tmp_path / "out") is not None


@pytest.mark.keeps("perplexity-rises-more-allowed")
@pytest.mark.parametrize(
    ("loss", "force", "refused"),
    [(0.1, False, False), (0.11, False, True), (-0.2, False, False), (0.5, True, False), (None, False, False),
     (float("nan"), False, True), (float("inf"), False, True)],
)  # fmt: skip
def test_the_gate(loss, force, refused):
    if not refused:
        check_quality(loss, 0.1, "int4", force)
        return
    with pytest.raises(QualityError, match="nothing was written"):
        check_quality(loss, 0.1, "int4", force)


@pytest.mark.keeps("wrong-input-missing-other")
@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"to": "int7"}, "--to 'int7' is not known: did you mean int4?|int8"),
        ({"to": "gptq"}, "GPTQModel"),
        ({"to": "gguf_q8_0"}, "tightfit export --to gguf_q8_0 writes GGUF"),
        ({"to": "int8_static"}, "give --calibration FILE"),
        ({"to": "int8_static", "calibration": "nowhere.txt"}, "--calibration 'nowhere.txt': no such file"),
        ({"calibration": "text.txt"}, "--calibration is for int8_static"),
        ({"max_loss": -0.1}, "--max-loss is -0.1"),
        ({"max_loss": float("nan")}, "--max-loss is nan"),
        ({"source": "nowhere"}, "no such folder"),
        ({"output": "run"}, "is not an empty folder"),
        ({"text": "nowhere.txt"}, "--text 'nowhere.txt': no such file"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(folders, tmp_path, monkeypatch, changed, line):
    monkeypatch.chdir(folders.root)
    asked = {"source": "run", "to": "int8", "output": str(tmp_path / "out"), "text": "text.txt", "seq_len": 16}
    with pytest.raises(InputError, match=line) as caught:
        package.quantise(**{**asked, **changed})
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.keeps("wrong-input-missing-other")
def test_what_this_machine_lacks_is_one_line(folders, tmp_path, monkeypatch):
    def quantise(**changed):
        package.quantise(**{"source": folders.run, "to": "int4", "output": tmp_path / "out", **changed})

    monkeypatch.setattr(torchao_weights, "has_int4", lambda: False)
    with pytest.raises(InputError, match="no products of 4-bit weights for this CPU: take int8"):
        quantise()
    monkeypatch.setattr(torchao_weights, "int8_products_are_exact", lambda: False)
    with pytest.raises(InputError, match="overflow on this CPU"):
        quantise(to="int8_dynamic")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.21.1")
    with pytest.raises(InputError, match=r"torchao 0.21.1 is installed, .* need torchao>=0.18,<0.19: pip install"):
        quantise()
    with pytest.raises(InputError, match="pip install"):
        load_model(folders.int8)

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(InputError, match=r"not installed: pip install 'tightfit\[lowbit\]'"):
        quantise()


@pytest.mark.keeps("wrong-input-missing-other")
def test_without_a_tokenizer_only_force_writes(folders, tmp_path):
    shutil.copytree(folders.llama, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(InputError, match="has no tokenizer, so the loss of quality cannot be measured"):
        package.quantise(tmp_path / "bare", to="int8", output=tmp_path / "out")
    report = package.quantise(tmp_path / "bare", to="int8", output=tmp_path / "out", force=True, seq_len=16)
    assert report.after.perplexity is None
    assert "Perplexity was not measured" in str(report)


@pytest.mark.keeps("quantised-folder-changed-refused")
def test_a_damaged_folder_is_refused_by_file(folders, tmp_path):
    def damaged(name, change):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(folders.int8, tmp_path / "copy")
        path = tmp_path / "copy" / name
        path.write_bytes(change(path.read_bytes()))
        with pytest.raises(ModelError, match=name) as caught:
            load_model(tmp_path / "copy")
        assert "\n" not in str(caught.value)

    damaged("quantised.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    damaged("quantised.safetensors", lambda content: content[:100])
    damaged("quantisation.json", lambda content: content[:40])
    damaged("quantisation.json", lambda content: b"[]")
    damaged("quantisation.json", lambda content: content.replace(b'"int8"', b'"int7"'))
    damaged("quantisation.json", lambda content: content.replace(b'"method"', b'"methods"'))


def test_layers_that_a_method_cannot_take_stay_as_they_are():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.even, self.narrow, self.short = nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 20)
            self.twin = nn.Linear(64, 48)
            self.tied = nn.Embedding(48, 64)
            self.twin.weight = self.tied.weight

    chosen = choose_layers(Odd(), "int4")
    assert chosen.paths == ("even",)
    assert chosen.left == {
        "narrow": "48 inputs are no multiple of 32",
        "short": "20 outputs are no multiple of 16",
        "twin": "another module has the same weight",
    }
    assert choose_layers(Odd(), "int8").paths == ("even", "narrow", "short")
    with pytest.raises(SourceError, match="no linear layer that int4 can take"):
        choose_layers(nn.Sequential(nn.Linear(40, 16)), "int4")


@pytest.mark.keeps("4-bit-codes-stored")
@pytest.mark.parametrize("shape", [(16, 32), (80, 96), (128, 64), (192, 160)])
def test_plain_codes_of_int4_are_those_that_were_rounded_to(shape):
    """Whatever order this CPU packs them in."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))
    weight = layer[0].weight.detach().clone()
    quantise_layers(layer, "int4", ["0"])
    parts = parts_of(layer[0].weight)
    halves = parts.tensors["codes"]
    codes = torch.stack((halves & 15, halves >> 4), -1).flatten(1).float()
    scale, zero = parts.tensors["scale_and_zero"].repeat_interleave(32, dim=0).unbind(-1)
    represented = (codes - 8) * scale.t() + zero.t()
    assert (represented - weight).abs().max() <= scale.max() * 0.51
    x = torch.randn(3, shape[1])
    again = weight_of(parts, "int4")
    with torch.no_grad():
        assert torch.equal(nn.functional.linear(x, again), layer(x))
        assert torch.allclose(layer(x), x @ represented.t(), atol=1e-5)


def test_a_model_is_built_without_memory_and_with_its_tables():
    with parameters_without_memory():
        model = decoder(hidden_size=32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.rotary.cos, decoder(hidden_size=32).rotary.cos)
    assert not decoder(hidden_size=32).embedding.weight.is_meta


def test_adapters_and_exports_know_quantised_weights(folders, tmp_path):
    with pytest.raises(ModelError, match="has quantised weights"):
        export_model(load_model(folders.int8), tmp_path / "out")
