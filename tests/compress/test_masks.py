"""Masks over single weights, against brute force; and a training that keeps them."""

import pytest
import torch
from tiny_sources import IDS, TEXT, loaded, logits, tiny_folder, tiny_model

from command_line import tightfit
from quick_trainings import leave_out_pictures
from tightfit.errors import InputError, ModelError
from tightfit.models.compress.pruning.masking import lowest_of_rows, maskable, removed_weights
from tightfit.models.compress.pruning.pipeline import prune
from tightfit.models.compress.pruning.statistics import statistics_of
from tightfit.models.loading import build_model
from tightfit.models.masks import masks_bytes, masks_of, put_masks, read_masks
from tightfit.training.api import train
from tightfit.training.config import parse_config


def removed(model, pattern, sparsity=0.5, scope="layer", by="norm", rows=IDS):
    return removed_weights(model, sparsity, pattern, scope=scope, by=by, rows=rows)


def flat(weights):
    return torch.cat([weight.flatten() for weight in weights.values()])


@pytest.mark.keeps("masks-magnitude-matrix-wanda")
def test_magnitude_takes_the_smallest_of_each_matrix_or_of_all():
    model = tiny_model("mixtral")
    weights = maskable(model)
    names = {name.rpartition("layers.0.")[2] for name in weights if "layers.0." in name}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert names == attention | {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    everything = flat(weights).abs()
    with torch.no_grad():
        weights["model.layers.1.self_attn.q_proj.weight"][:4] = 0.05  # equal ones: the first go first

    for sparsity in (0.3, 0.5):
        found = removed(model, "magnitude", sparsity)
        for name, weight in weights.items():
            order = weight.abs().flatten().sort(stable=True).indices[: round(sparsity * weight.numel())]
            wanted = torch.zeros(weight.numel(), dtype=torch.bool)
            wanted[order] = True
            assert torch.equal(found[name].flatten(), wanted), name

    everything = flat(weights).abs()
    wanted = torch.zeros(len(everything), dtype=torch.bool)
    wanted[everything.sort(stable=True).indices[: round(0.4 * len(everything))]] = True
    assert torch.equal(flat(removed(model, "magnitude", 0.4, "global")), wanted)


@pytest.mark.keeps("masks-magnitude-matrix-wanda")
def test_wanda_and_two_of_four_are_what_their_definitions_say():
    model = tiny_model("qwen2")
    name = "model.layers.2.mlp.up_proj.weight"
    layer, weight, inputs = model.model.layers[2].mlp.up_proj, maskable(model)[name], []
    handle = layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0].flatten(0, 1)))
    logits(model)
    handle.remove()
    scores = weight.abs() * inputs[0].square().sum(0).sqrt()

    wanda = removed(model, "wanda", 0.25)[name]
    fours = removed(model, "2:4")[name]
    fours_by_wanda = removed(model, "2:4", by="activation")[name]

    for row in range(len(weight)):
        lowest = set(sorted(range(32), key=lambda column: scores[row, column].item())[:8])
        assert set(wanda[row].nonzero().flatten().tolist()) == lowest
        for first in range(0, 32, 4):
            four = range(first, first + 4)
            for mask, figures in ((fours, weight.abs()), (fours_by_wanda, scores)):
                pair = set(sorted(four, key=lambda column: figures[row, column].item())[:2])
                assert {column for column in four if mask[row, column]} == pair


@pytest.mark.keeps("masks-magnitude-matrix-wanda")
def test_an_experts_inputs_are_those_of_the_tokens_that_it_gets():
    model = tiny_model("mixtral")
    found = statistics_of(model, IDS)
    block, seen = model.model.layers[1].mlp, []
    block.register_forward_pre_hook(lambda module, given: seen.append(given[0].flatten(0, 1)))
    logits(model)
    tokens = seen[0]
    _, _, chosen = block.gate(tokens)
    squares = found.inputs["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(3):
        wanted = tokens[(chosen == expert).any(-1)].square().sum(0)
        torch.testing.assert_close(squares[expert], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.keeps("masked-weights-exactly-zero")
def test_masks_come_back_from_their_file_bit_for_bit(tmp_path):
    masks = {"a": torch.rand(3, 5, 7) < 0.5, "b": torch.rand(13) < 0.5}
    (tmp_path / "masks.safetensors").write_bytes(masks_bytes(masks))
    read = read_masks(tmp_path)
    assert all(torch.equal(read[name], mask) for name, mask in masks.items())
    with pytest.raises(ModelError, match=r"mask \(3, 5, 7\) for a, and the model has no such weight"):
        put_masks(tiny_model("llama"), read)
    (tmp_path / "masks.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="holds no masks"):
        read_masks(tmp_path)


def zeros(model, masks):
    """Whether every masked weight is zero, and others are not."""
    weights = dict(model.named_parameters())
    assert masks
    return all(torch.equal(weights[name][mask], torch.zeros(int(mask.sum()))) for name, mask in masks.items()) and all(
        weights[name][~mask].count_nonzero() > 0 for name, mask in masks.items()
    )


@pytest.mark.slow  # three trainings
@pytest.mark.keeps("masked-weights-exactly-zero")
def test_masked_weights_stay_zero_through_steps_a_save_and_a_resume(tmp_path, monkeypatch):
    leave_out_pictures(monkeypatch)
    source = tiny_folder(tmp_path / "model", tiny_model("llama", num_hidden_layers=2))
    report = prune(source, sparsity=0.5, scope="global", output=tmp_path / "sparse", seq_len=16)
    masks = read_masks(tmp_path / "sparse")
    assert sum(int(mask.sum()) for mask in masks.values()) == round(0.5 * sum(m.numel() for m in masks.values()))
    assert zeros(loaded(tmp_path / "sparse"), masks)
    # Masks save nothing: a training holds them besides.
    whole = sum(mask.numel() for mask in masks.values())
    assert report.after.parameters == report.before.parameters
    assert report.after.inference_peak_bytes == report.before.inference_peak_bytes
    assert report.after.step_peak_bytes - report.before.step_peak_bytes == whole
    assert report.after.measured_step_peak_bytes - report.before.measured_step_peak_bytes == whole

    sections = {
        "model": {"path": str(tmp_path / "sparse")},
        "data": {
            "source": str(source / "text.txt"),
            "sequence_length": 16,
            "tokenizer": "model",
            "validation_fraction": 0,
        },
        "training": {"max_steps": 3, "batch_size": 2, "learning_rate": 1e-2, "device": "cpu", "weight_decay": 0.1},
        "checkpoint": {"every_steps": 2},
        "output": {"folder": str(tmp_path / "run")},
    }
    result = train(parse_config(sections))
    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, rel=1e-3)
    assert zeros(loaded(tmp_path / "run"), masks)
    assert any(not torch.equal(a, b) for a, b in zip(loaded(tmp_path / "run").parameters(),
                                                    loaded(tmp_path / "sparse").parameters(), strict=True))  # fmt: skip
    kept = read_masks(tmp_path / "run")
    assert all(torch.equal(kept[name], mask) for name, mask in masks.items())

    sections["training"]["max_steps"] = 5
    train(parse_config(sections), resume=True)
    assert zeros(loaded(tmp_path / "run"), masks)
    assert read_masks(tmp_path / "run").keys() == masks.keys()

    permanent = tightfit("prune", tmp_path / "run", "--permanent", "--output", tmp_path / "dense", "--seq-len", 16)
    assert permanent.code == 0
    assert "the next training may move them" in " ".join(permanent.out.split())
    assert read_masks(tmp_path / "dense") == {}
    assert zeros(loaded(tmp_path / "dense"), masks)
    assert torch.equal(logits(loaded(tmp_path / "dense")), logits(loaded(tmp_path / "run")))

    refused = tightfit("prune", tmp_path / "run", "--ffn", 0.25, "--output", tmp_path / "other")
    assert refused.code == 2
    assert "make it permanent first" in refused.error
    assert masks_of(build_model(parse_config(sections).model)) == {}
    sections["model"]["adapter"] = {"r": 2, "target_modules": ["q_proj"]}
    sections["output"]["folder"] = str(tmp_path / "adapted")
    with pytest.raises(ModelError, match=r"model.adapter would fill its zeros"):
        train(parse_config(sections))


@pytest.mark.keeps("wrong-shares-patterns-texts")
def test_bad_settings_are_one_line(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    source = tiny_folder(tmp_path / "model", tiny_model("llama", num_hidden_layers=1))
    said = {
        "--sparsity 1.2 is not between 0 and 1": ["--sparsity", 1.2],
        "--pattern 'lottery' is not known": ["--sparsity", 0.5, "--pattern", "lottery"],
        "--pattern 2:4 sets half of the weights to zero": ["--sparsity", 0.25, "--pattern", "2:4"],
        "--pattern wanda is measured on real text": ["--sparsity", 0.5, "--pattern", "wanda"],
        "--by gradient is measured on real text": ["--ffn", 0.5, "--by", "gradient"],
        "--by 'chance' is not known": ["--ffn", 0.5, "--by", "chance"],
        "--calibration 'nowhere.txt': no such file": ["--ffn", 0.5, "--calibration", "nowhere.txt"],
        "--ffn 1.5 is not between 0 and 1": ["--ffn", 1.5],
        "--heads 0.3 of 4 key and value heads": ["--heads", 0.3],
        "nothing to prune": [],
        "--to-fit needs the length": ["--to-fit", "1GiB"],
        "has no masks.safetensors": ["--permanent"],
        "--scope global is for --pattern magnitude": ["--sparsity", 0.5, "--pattern", "2:4", "--scope", "global"],
    }
    for line, arguments in said.items():
        done = tightfit("prune", source, "--output", tmp_path / "out", *arguments)
        assert done.code == 2, line
        assert line in done.error
        assert not (tmp_path / "out").exists()
    done = tightfit("prune", tmp_path / "nothing", "--ffn", 0.5, "--output", tmp_path / "out")
    assert (done.code, "no such folder" in done.error) == (2, True)
    with pytest.raises(ModelError, match="rows of 66 weights, which fours do not fill"):
        removed(tiny_model("llama", intermediate_size=66), "2:4")
    with pytest.raises(ModelError, match="has no linear layers"):
        maskable(torch.nn.Embedding(4, 4))
    assert lowest_of_rows(torch.ones(1, 5), 0.5).tolist() == [[True, True, False, False, False]]
    with pytest.raises(InputError, match="nothing to prune"):
        prune(source, output=tmp_path / "out")
