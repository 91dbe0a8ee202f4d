"""Whole parts taken out of a model: what stays computes what it did, and a training step takes what was predicted."""

import subprocess
import sys

import pytest
import torch
from tiny_sources import IDS, KINDS, loaded, logits, tiny_folder, tiny_model

from tightfit.errors import InputError, ModelError
from tightfit.models.compress.pruning.anatomy import Anatomy, Ratios, Removal, config_after, removal_of
from tightfit.models.compress.pruning.importance import BY, kept_parts, scores_of
from tightfit.models.compress.pruning.pipeline import prune
from tightfit.models.compress.pruning.slicing import Axis, part_of, sliced, spread
from tightfit.step import TokenBatch
from tiny import allocator_peak

ALL = Ratios(layers=0.25, ffn=0.25, heads=0.25, width=0.25)


def without(model, ratios, by="norm"):
    """The pruned model, and the parts that stay."""
    anatomy = Anatomy.of(model.config)
    removal = removal_of(anatomy, ratios)
    kept = kept_parts(scores_of(model, anatomy, by, IDS), anatomy, removal)
    return sliced(model, anatomy, removal, kept), kept


@torch.no_grad()
def emptied(model, ratios):
    """Set what a pruning by these ratios takes out to zero: as many parts, here the first ones."""
    anatomy = Anatomy.of(model.config)
    removal = removal_of(anatomy, ratios)
    for name, parameter in model.named_parameters():
        part = part_of(name)
        if part.layer is not None and part.layer < removal.layers and parameter.dim() > 1:
            parameter.zero_()
        for dim, axis in enumerate(part.axes):
            parts = parameter.movedim(dim, 0)
            if axis is Axis.FFN:
                parts[: removal.ffn] = 0
            elif axis is Axis.EXPERT_FFN:
                parts[: removal.expert_ffn] = 0
            elif axis is Axis.GATE_UP:
                for half in parts.chunk(2):
                    half[: removal.expert_ffn] = 0
            elif axis is Axis.WIDTH and (parameter.dim() > 1 or name.endswith("bias")):
                parts[: removal.hidden] = 0
            elif axis in (Axis.KEYS, Axis.QUERIES):
                heads = anatomy.queries if axis is Axis.QUERIES else 1
                parts[: removal.groups * heads * anatomy.head_width] = 0
    return model


@pytest.mark.keeps("parts-taken-out-zero")
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_stay_where_what_is_taken_out_is_zero(kind):
    heads = 0.5 if "biases" in kind else 0.25  # six query heads do not divide 32 channels: then it is no Llama
    for ratios in (Ratios(layers=0.25), Ratios(ffn=0.25, heads=heads), Ratios(width=0.25 if heads < 0.5 else 0.5)):
        model = emptied(tiny_model(kind, rms_norm_eps=1e-12), ratios)
        if ratios.layers and "biases" in kind:
            for bias in ("self_attn.o_proj.bias", "mlp.down_proj.bias"):
                model.model.layers[0].get_parameter(bias).data.zero_()
        pruned, _ = without(model, ratios)
        assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
        torch.testing.assert_close(logits(pruned), logits(model), rtol=1e-3, atol=1e-4)
        assert (pruned.config.model_type == "mistral") == (kind == "mistral" or (kind == "llama" and bool(ratios.ffn)))
        if ratios.layers:
            assert torch.equal(logits(pruned), logits(model))


@pytest.mark.keeps("parts-ranked-documented-weights")
@pytest.mark.parametrize("by", BY)
def test_the_parts_that_do_nothing_go_first_and_those_that_matter_stay_in_order(by):
    model = tiny_model("mixtral")
    with torch.no_grad():
        layer = model.model.layers[2]
        layer.self_attn.o_proj.weight.mul_(1e-4)
        layer.mlp.experts.down_proj.mul_(1e-4)
        idle = torch.tensor([3, 17, 40])
        model.model.layers[1].mlp.experts.down_proj[1][:, idle] = 0
        model.model.layers[1].mlp.experts.gate_up_proj[1][idle] = 0
        model.model.layers[1].mlp.experts.gate_up_proj[1][64 + idle] = 0
        model.model.layers[3].self_attn.o_proj.weight[:, spread(torch.tensor([1]), 8)] = 0
        for name in ("q_proj", "k_proj", "v_proj"):
            size = 8 if name == "q_proj" else 4
            getattr(model.model.layers[3].self_attn, name).weight[spread(torch.tensor([1]), size)] = 0
    _, kept = without(model, Ratios(layers=0.25, ffn=0.25, heads=0.25), by)
    assert kept.layers == [0, 1, 3]
    assert not set(kept.ffn[1][1].tolist()) & {3, 17, 40}
    assert kept.groups[3].tolist() == [0, 2, 3]
    assert all(torch.equal(row, row.sort().values) for layer in kept.ffn.values() for row in layer)


@pytest.mark.keeps("parts-ranked-documented-weights")
def test_scores_by_activation_are_what_a_channel_adds_on_the_text():
    """Against the definition, computed from the outputs of a forward."""
    model = tiny_model("llama")
    scores = scores_of(model, Anatomy.of(model.config), "activation", IDS)
    seen = []
    mlp = model.model.layers[1].mlp
    handle = mlp.down_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, 1)))
    logits(model)
    handle.remove()
    added = torch.einsum("tc,oc->cto", seen[0], mlp.down_proj.weight.detach())  # of each channel to each output
    torch.testing.assert_close(scores.ffn[1], added.square().sum((1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.keeps("parts-ranked-documented-weights")
def test_scores_by_gradient_are_the_loss_that_a_removal_costs_to_first_order():
    """Against the slope of the loss along a shrinking of the part."""
    model = tiny_model("qwen3").double()
    scores = scores_of(model, Anatomy.of(model.config), "gradient", IDS[:1])
    weight, step = model.model.layers[2].self_attn.o_proj.weight.data, 1e-2
    columns = spread(torch.tensor([2]), 2 * 6)  # a group has two query heads of six numbers

    def loss(factor):
        before = weight[:, columns].clone()
        weight[:, columns] *= factor
        with torch.no_grad():
            found = model(input_ids=IDS[:1], labels=IDS[:1]).loss.item()
        weight[:, columns] = before
        return found

    slope = (loss(1 + step) - loss(1 - step)) / (2 * step)
    assert scores.groups[2][2].item() == pytest.approx(abs(slope), rel=0.02)


@pytest.mark.slow  # an interpreter of its own
def test_parts_ranked_without_a_text_are_said_to_be(tmp_path):
    source = tiny_folder(tmp_path / "model", tiny_model("llama"))
    command = [sys.executable, "-m", "tightfit", "prune", source, "--ffn", "0.25", "--output", tmp_path / "out"]
    done = subprocess.run([*command, "--seq-len", "16"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--calibration FILE ranks parts by what they do on a text" in " ".join(done.stdout.split())
    own = done.stderr.partition("nanobind: ")[0]  # Triton's bindings complain at the end of Python 3.14
    assert own == "", "bars of transformers are no lines of a log"


SLOW = pytest.mark.slow  # the same road with another model and a text


@pytest.mark.keeps("pruned-folder-loads-transformers")
@pytest.mark.parametrize("by", ["norm", pytest.param("activation", marks=SLOW)])
def test_a_pruned_folder_loads_with_equal_logits_and_steps_in_the_predicted_memory(tmp_path, by):
    source = tiny_folder(tmp_path / "model", tiny_model("llama" if by == "norm" else "qwen3_moe"))
    calibration = None if by == "norm" else source / "text.txt"
    ratios = {"layers": 0.25, "ffn": 0.25, "heads": 0.25, "width": 0.25}

    report = prune(
        source, output=tmp_path / "out", calibration=calibration, seq_len=16, batch_size=2, text=source / "text.txt",
        **ratios,
    )  # fmt: skip

    pruned, _ = without(loaded(source), ALL) if by == "norm" else (None, None)
    read = loaded(tmp_path / "out")
    if pruned is not None:
        assert torch.equal(logits(read), logits(pruned))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    after, before = report.after, report.before
    assert after.parameters == sum(p.numel() for p in read.parameters()) < before.parameters
    measured = allocator_peak(read.train(), TokenBatch(2, 16, 300).tensors())
    assert after.step_peak_bytes == pytest.approx(measured, rel=1e-3)
    assert after.measured_step_peak_bytes == pytest.approx(measured, rel=1e-3)
    assert after.step_peak_bytes < before.step_peak_bytes
    assert after.inference_peak_bytes == pytest.approx(after.measured_inference_peak_bytes, rel=1e-3)
    assert after.perplexity > 0
    assert not any("--calibration" in note for note in report.notes)


@pytest.mark.slow  # each part by itself, and each kind of model: a minute of dry runs and of real steps
@pytest.mark.parametrize("kind", [kind for kind in KINDS if " " not in kind])
@pytest.mark.parametrize("part", ["layers", "ffn", "heads", "width"])
def test_a_quarter_of_each_part_saves_what_is_predicted(tmp_path, kind, part):
    source = tiny_folder(tmp_path / "model", tiny_model(kind))
    report = prune(source, output=tmp_path / "out", seq_len=32, batch_size=2, by="gradient",
                   calibration=source / "text.txt", **{part: 0.25})  # fmt: skip
    read = loaded(tmp_path / "out")
    measured = allocator_peak(read.train(), TokenBatch(2, 32, 300).tensors())
    assert report.after.step_peak_bytes == pytest.approx(measured, rel=1e-3)
    assert report.after.step_peak_bytes < report.before.step_peak_bytes


@pytest.mark.keeps("parts-taken-out-zero")
def test_layers_that_differ_keep_their_kind():
    config = tiny_model("qwen3_moe").config
    anatomy = Anatomy.of(config)
    assert (anatomy.dense, anatomy.ffn, anatomy.expert_ffn) == ((0, 3), 64, 32)
    assert config_after(config, anatomy, Removal(layers=2), [1, 3]).mlp_only_layers == [1]
    windows = tiny_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2).config
    assert config_after(windows, Anatomy.of(windows), Removal(layers=2), [1, 3]).layer_types == [
        "full_attention",
        "sliding_attention",
    ]


@pytest.mark.keeps("wrong-shares-patterns-texts")
def test_what_cannot_be_sliced_is_refused_by_name():
    llama = tiny_model("llama").config
    said = {
        "--ffn 1.5 is not between 0 and 1": lambda: Ratios(ffn=1.5),
        "--layers 0 is not between 0 and 1": lambda: Ratios(layers=0),
        "--heads 0.3 of 4 key and value heads is 1.2: .* multiple of 0.25 up to 0.75": lambda: removal_of(
            Anatomy.of(llama), Ratios(heads=0.3)
        ),
        "--layers 0.05 of 4 layers is none": lambda: removal_of(Anatomy.of(llama), Ratios(layers=0.05)),
        "--ffn 0.99 of 64 channels of an MLP is all": lambda: removal_of(Anatomy.of(llama), Ratios(ffn=0.99)),
    }
    for line, ask in said.items():
        with pytest.raises(InputError, match=line):
            ask()
    with pytest.raises(ModelError, match=r"no Llama with 32 hidden channels and 6 query heads.* has no biases"):
        config_after(tiny_model("llama with biases").config, Anatomy.of(llama), Removal(groups=1))
    gpt2 = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64).config
    with pytest.raises(ModelError, match="'gpt2' cannot be sliced"):
        Anatomy.of(gpt2)
    with pytest.raises(ModelError, match=r"transformer.wte.weight cannot be sliced"):
        part_of("transformer.wte.weight")
