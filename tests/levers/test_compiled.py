"""Compiled blocks: once for a kind, gradients as exact as the plain ones, less held; and where they are refused."""

import copy
import pickle

import pytest
import torch

import tightfit
from tightfit.config import parse_config
from tightfit.errors import DeviceError, LeverError
from tightfit.step import model_loss
from tiny import allocator_peak, decoder, token_batch


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model_loss(model, batch).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def error(found, truth):
    size = sum(t.square().sum() for t in truth.values())
    return float((sum((found[name] - t).square().sum() for name, t in truth.items()) / size).sqrt())


def forwards(model):
    return [module.__dict__.get("forward") for module in model.modules()]


@pytest.mark.slow  # inductor compiles C++ for some ten seconds
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo itself asks it of what it is given
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.parametrize("keep", [1.0, 0.0])
def test_one_compilation_serves_all_blocks_and_the_peak_falls_below_the_eager_one(keep):
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model, batch = decoder(num_layers=4, hidden_size=128), token_batch(8)
    truth = gradients(copy.deepcopy(model).double(), batch)
    plain = error(gradients(model, batch), truth)
    eager_peak = allocator_peak(copy.deepcopy(model), batch)
    with tightfit.recompute(model, "layers.*"):
        recomputed_peak = tightfit.estimate(model, batch).peak_bytes
    with tightfit.compile_blocks(model, "layers.*", keep=keep):
        compiled = error(gradients(model, batch), truth)
        peak = allocator_peak(model, batch)
    assert counters["stats"]["unique_graphs"] == 1
    assert 0 < compiled <= 1.5 * plain
    assert peak < 0.95 * eager_peak
    if keep == 0:
        assert peak < 1.25 * recomputed_peak


def test_a_dry_run_and_evaluation_see_the_blocks_as_they_were_written():
    model, batch = decoder(), token_batch(2)
    plain = tightfit.estimate(model, batch)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    with tightfit.compile_blocks(model, "layers.*"):
        assert tightfit.estimate(model, batch).peak_bytes == plain.peak_bytes
        with torch.no_grad():
            assert torch.equal(model(batch["input_ids"]).logits, logits)


def test_undo_restores_every_forward_and_copies_stay_compiled():
    model = decoder()
    before = forwards(model)
    applied = tightfit.compile_blocks(model, "layers.*")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.layers[0].forward.module is twin.layers[0]
        assert twin.layers[0].forward.keep == 1.0
    assert forwards(model) != before
    applied.undo()
    assert forwards(model) == before


def test_recompute_and_compiled_blocks_refuse_each_other():
    model, batch = decoder(), token_batch(8)
    with tightfit.compile_blocks(model, "layers.*"):
        with pytest.raises(LeverError, match=r"layers\.0 is already compiled: undo that first"):
            tightfit.recompute(model, "layers.*")
        with pytest.raises(LeverError, match="is already compiled: undo that first"):
            tightfit.plan(model, batch, "0.6x")
    with tightfit.recompute(model, "layers.*"), pytest.raises(LeverError, match=r"layers\.0 is already recomputed"):
        tightfit.compile_blocks(model, "layers.*")


@pytest.mark.parametrize("keep", [-0.1, 1.5])
def test_a_share_that_is_none_is_refused(keep):
    with pytest.raises(LeverError, match=r"is not a share: give a number from 0 to 1"):
        tightfit.compile_blocks(decoder(), "layers.*", keep=keep)


def test_a_forward_that_somebody_replaced_is_refused_and_nothing_is_changed():
    model = decoder()
    model.layers[1].forward = lambda x, cos, sin: x
    before = forwards(model)
    with pytest.raises(LeverError, match=r"layers\.1: its forward was replaced"):
        tightfit.compile_blocks(model, "layers.*")
    assert forwards(model) == before


def test_without_a_compiler_it_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DeviceError, match=r"needs a C\+\+ compiler: install g\+\+"):
        tightfit.compile_blocks(decoder(), "layers.*")


@pytest.mark.slow  # inductor compiles C++ for some ten seconds
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo itself asks it of what it is given
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
def test_a_training_with_compiled_blocks_learns_and_takes_less_than_foretold(tmp_path):
    sections = {
        "model": {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 300, "max_position_embeddings": 64},
        "data": {"max_documents": 20, "sequence_length": 64, "vocab_size": 300},
        "training": {"max_steps": 5, "learning_rate": 1e-2, "device": "cpu"},
        "memory": {"compile_blocks": True},
        "output": {"folder": str(tmp_path / "run")},
    }
    result = tightfit.train(parse_config(sections))
    assert result.last_loss < result.first_loss
    assert result.measured_peak_bytes < result.predicted_peak_bytes
