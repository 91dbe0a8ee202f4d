"""Compiled blocks that keep what a policy says: the predicted bytes, gradients as exact as the plain ones."""

import copy
from contextlib import nullcontext

import pytest
import torch

import tightfit
from tightfit.errors import DeviceError
from tightfit.levers.captured import CapturedForward, capture_paths
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL, OperatorKey, Policy
from tightfit.step import StepSettings, model_loss
from tiny import VOCABULARY, allocator_peak, decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
]

ATTENTION = OperatorKey("aten._scaled_dot_product_flash_attention_for_cpu.default", 0)
PRODUCTS = Policy(frozenset({*(OperatorKey("aten.mm.default", place) for place in range(9)), ATTENTION}))
SOFTMAX = Policy(frozenset({OperatorKey("aten._safe_softmax.default", 0)}))
POLICIES = {
    "keep all": KEEP_ALL, "keep products": PRODUCTS, "keep softmax": SOFTMAX, "recompute all": RECOMPUTE_ALL,
}  # fmt: skip
SIZE = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(config), "model.layers.*"


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**SIZE, n_embd=64, n_layer=2, n_head=4)).train(), "transformer.h.*"


def ours():
    return decoder(num_layers=2, hidden_size=64), "layers.*"


def dropping():
    return decoder(num_layers=2, hidden_size=64, dropout=0.1).train(), "layers.*"


def dropping_in_attention():
    """Its draws are written in place, after a softmax whose kernel reads them."""
    return decoder(num_layers=2, hidden_size=32, num_heads=2, attention_dropout=0.1).train(), "layers.*"


CASES = [
    (ours, "keep all", "fp32"),
    (ours, "keep products", "fp32"),
    (ours, "recompute all", "fp32"),
    (ours, "keep products", "bf16"),
    (dropping, "recompute all", "fp32"),
    (dropping_in_attention, "keep softmax", "fp32"),
    (llama, "keep products", "bf16"),
    (llama, "recompute all", "fp32"),
    (gpt2, "keep products", "fp32"),
    (gpt2, "recompute all", "bf16"),
]


def gradients(model, batch, precision="fp32"):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
        loss = model_loss(model, batch)
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def error(found, truth):
    size = sum(t.square().sum() for t in truth.values())
    return float((sum((found[name] - t).square().sum() for name, t in truth.items()) / size).sqrt())


@pytest.mark.keeps("plan-recompute-compile-decides")
@pytest.mark.slow  # compiles C++ for some ten seconds
@pytest.mark.parametrize(("make", "policy", "precision"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bytes_are_those_predicted_and_gradients_as_exact_as_the_plain_ones(make, policy, precision):
    torch.manual_seed(0)
    model, pattern = make()
    batch = token_batch(4)
    dropout = make in (dropping, dropping_in_attention, gpt2)
    plain, state = gradients(model, batch, precision), torch.get_rng_state()
    with tightfit.capture(model, pattern, policy=POLICIES[policy], compiled=True):
        predicted = tightfit.estimate(model, batch, precision=precision).peak_bytes
        found = gradients(model, batch, precision)
        assert torch.equal(torch.get_rng_state(), state)
        measured = allocator_peak(copy.deepcopy(model), batch, settings=StepSettings(precision))
        forwards = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
        assert {(type(forward), forward.refused) for forward in forwards} == {(CapturedForward, None)}
    assert predicted == measured
    if dropout:  # the draws of fp64 are others
        assert error(found, plain) < (1e-5 if precision == "fp32" else 0.02)
        return
    truth = gradients(copy.deepcopy(model).double(), batch)
    assert 0 < error(found, truth) <= 1.05 * error(plain, truth)


@pytest.mark.keeps("beside-plain-recorded-captured")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_a_retained_graph_gives_the_same_gradients_again_although_backward_writes_into_saved_tensors():
    (model, pattern), batch = ours(), token_batch(4)
    with tightfit.capture(model, pattern, compiled=True):
        loss = model_loss(model, batch)
        weights = list(model.parameters())
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        second = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, first, second))


@pytest.mark.slow  # compiles C++ for some ten seconds
def test_compiled_captured_and_recorded_blocks_stand_in_one_model():
    model, batch = decoder(num_layers=4, hidden_size=64), token_batch(4)
    plain = gradients(model, batch)
    truth = gradients(copy.deepcopy(model).double(), batch)
    policies = {"layers.0": PRODUCTS, "layers.1": RECOMPUTE_ALL}
    with capture_paths(model, policies, fused=["layers.1"]), tightfit.recompute(model, "layers.2"):
        assert tightfit.estimate(model, batch).peak_bytes == allocator_peak(copy.deepcopy(model), batch)
        assert error(gradients(model, batch), truth) <= 1.05 * error(plain, truth)


@pytest.mark.keeps("beside-plain-recorded-captured")
@pytest.mark.slow  # compiles C++ for some ten seconds
def test_frozen_blocks_and_evaluation_need_no_backward():
    (model, pattern), batch = ours(), token_batch(4)
    logits = model(batch["input_ids"]).logits.detach()
    model.layers[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    with tightfit.capture(model, pattern, compiled=True):
        assert torch.allclose(model(batch["input_ids"]).logits, logits, atol=1e-5)
        with torch.no_grad():
            assert torch.equal(model(batch["input_ids"]).logits, logits)
        assert [vars(layer)["forward"].refused for layer in model.layers] == [None, None]


@pytest.mark.keeps("beside-plain-recorded-captured")
def test_in_steps_that_the_monitor_observes_the_recorder_stands_in():
    (beside, pattern), batch = ours(), token_batch(2)
    model = copy.deepcopy(beside)
    trained(beside, batch)
    with tightfit.capture(model, pattern, policy=RECOMPUTE_ALL, compiled=True):
        trained(model, batch)
        assert all(vars(layer)["forward"]._recorded for layer in model.layers)
    assert all(map(torch.equal, model.parameters(), beside.parameters()))


def trained(model, batch):
    """One monitored step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tightfit.monitor(model, optimizer):
        model_loss(model, batch).backward()
        optimizer.step()


def test_without_a_compiler_it_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DeviceError, match=r"needs a C\+\+ compiler: install g\+\+"):
        tightfit.capture(decoder(), "layers.*", compiled=True)
