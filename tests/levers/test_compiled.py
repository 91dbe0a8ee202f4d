"""Compiled blocks: once for a kind, gradients as exact as the plain ones, predicted; and where they are refused."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

import tightfit
from tightfit.errors import CompileError, DeviceError, LeverError
from tightfit.levers.activity import simulators
from tightfit.levers.compiled import compile_paths
from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.runtime.internals import is_innermost
from tightfit.step import StepSettings, model_loss
from tightfit.tracing.compiled_code import KERNEL, compiled_runner, fresh
from tightfit.tracing.record import Phase
from tightfit.tracing.step import trace_step
from tightfit.training.config import parse_config
from tiny import VOCABULARY, allocator_peak, decoder, token_batch

GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
DEPRECATED = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler


def by_the_compiler(test):
    """A test in which PyTorch's compiler says more than our tests let pass."""
    return GRAD(DEPRECATED(test))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
    return LlamaForCausalLM(config), "model.layers.*"


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    plain = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**SIZE, **plain, n_embd=128, n_layer=3, n_head=4)), "transformer.h.*"


SIZE = {"vocab_size": VOCABULARY, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
OTHERS = {"llama": llama, "gpt2": gpt2}


def sum_of_squares(model, batch):
    return model(*batch).square().sum()


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model_loss(model, batch).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def error(found, truth):
    size = sum(t.square().sum() for t in truth.values())
    return float((sum((found[name] - t).square().sum() for name, t in truth.items()) / size).sqrt())


def forwards(model):
    return [module.__dict__.get("forward") for module in model.modules()]


@pytest.mark.keeps("compiled-blocks-compilation-blocks")
@pytest.mark.slow  # inductor compiles C++ for some ten seconds
@by_the_compiler
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


@pytest.mark.keeps("memory-compiled-blocks-cpu")
@pytest.mark.slow  # compiles
@pytest.mark.parametrize(
    "keep",
    [
        0.5,
        pytest.param(1.0, marks=pytest.mark.slow),  # each compiles C++ for some ten seconds
        pytest.param(0.0, marks=pytest.mark.slow),
    ],
)
@by_the_compiler
def test_what_compiled_blocks_take_is_predicted_before_anything_is_built(keep):
    model, batch = decoder(num_layers=4, hidden_size=128), token_batch(8)
    plain = tightfit.estimate(model, batch).peak_bytes
    with tightfit.compile_blocks(model, "layers.*", keep=keep):
        predicted = tightfit.estimate(model, batch).peak_bytes
        assert predicted == allocator_peak(model, batch)
    assert predicted < 0.9 * plain


@pytest.mark.keeps("memory-compiled-blocks-cpu")
@pytest.mark.slow  # compiles C++ for some ten seconds each time
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("keep", [1.0, 0.0])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@by_the_compiler
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_compiled_blocks_of_other_models_take_is_predicted(name, keep, precision):
    model, pattern = OTHERS[name]()
    batch = token_batch(4)
    with tightfit.compile_blocks(model, pattern, keep=keep):
        predicted = tightfit.estimate(model, batch, precision=precision).peak_bytes
        assert predicted == allocator_peak(model, batch, settings=StepSettings(precision))


@pytest.mark.keeps("memory-compiled-blocks-cpu")
@pytest.mark.slow  # blocks are compiled for real beside it
@by_the_compiler
def test_a_dry_run_builds_no_kernel_and_leaves_nothing_behind(monkeypatch):
    def refuse(*arguments, **settings):
        raise AssertionError("a kernel is built")

    def allocated(*arguments):
        watched.append(is_innermost(compiled_runner().dry))
        return fresh(*arguments)

    watched, share = [], 0.77  # a share of this test's own: code is written once for each
    monkeypatch.setattr("torch._inductor.async_compile.AsyncCompile.cpp_pybinding", refuse)
    monkeypatch.setattr("tightfit.tracing.compiled_code.fresh", allocated)
    model, batch = decoder(num_layers=2), token_batch(2)
    with tightfit.compile_blocks(model, "layers.*", keep=share):
        found = tightfit.estimate(model, batch).peak_bytes
        assert simulators.compiled is None
        with pytest.raises(Exception, match="a kernel is built"):
            model_loss(model, batch)
    # AOTAutograd runs code for the first time under a mode of its own. Under that one alone, products are computed.
    assert watched
    assert all(watched)
    without_memory = tightfit.build_dry(lambda: decoder(num_layers=2))
    with tightfit.compile_blocks(without_memory, "layers.*", keep=share):
        assert tightfit.estimate(without_memory, batch).peak_bytes == found


@pytest.mark.slow  # compiles
@by_the_compiler
def test_the_seconds_of_kernels_are_predicted_too():
    model, batch = decoder(num_layers=2), token_batch(2)
    with tightfit.compile_blocks(model, "layers.*"):
        parts = as_parts(split_batch(batch, 1), model_loss)
        trace = trace_step(model, parts, model_loss, cost=lambda name, inputs, outputs, arguments: len(inputs) + 1.0)
    kernels = [operator for operator in trace.operators if operator.name == KERNEL]
    assert {operator.phase for operator in kernels} == {Phase.FORWARD, Phase.BACKWARD}
    assert {operator.module for operator in kernels} == {"layers.0", "layers.1"}
    assert all(operator.seconds > 1 for operator in kernels), "each reads something"


def test_evaluation_sees_the_blocks_as_they_were_written():
    model, batch = decoder(), token_batch(2)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
        with tightfit.compile_blocks(model, "layers.*"):
            assert torch.equal(model(batch["input_ids"]).logits, logits)


@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.slow  # compiles
@by_the_compiler
@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_on_a_card_that_is_played_the_code_is_the_cards(keep):
    """The bytes are compared with a null card in tests/card/test_compiled_bytes.py."""
    model, batch = decoder(vocab_size=1000), token_batch(8, 256)
    plain = tightfit.estimate(model, batch, device="rtx4090").peak_bytes
    with tightfit.compile_blocks(model, "layers.*", keep=keep):
        assert tightfit.estimate(model, batch, device="rtx4090").peak_bytes < plain


class Broken(torch.nn.Module):
    """A block of which the compiler takes only parts."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.tanh() + x


def broken():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Broken() for _ in range(3))), (torch.randn(8, 16),)


class Numbered(torch.nn.Module):
    """A block whose code knows its number, as a layer that finds its place in a cache does."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.number = torch.nn.Linear(16, 16), number

    def forward(self, x):
        return self.linear(x) * {n: n + 1 for n in range(99)}[self.number]


@pytest.mark.slow  # nine compilations
@by_the_compiler
def test_more_than_eight_blocks_that_differ_in_a_constant_are_compiled_all():
    torch.manual_seed(0)
    model, batch = torch.nn.Sequential(*(Numbered(n) for n in range(9))), (torch.randn(8, 16),)
    plain = sum_of_squares(model, batch)
    with compile_paths(model, dict.fromkeys(map(str, range(9)), 1.0)):
        predicted = tightfit.estimate(model, batch, loss=sum_of_squares, optimizer="sgd").peak_bytes
        assert sum_of_squares(model, batch).item() == pytest.approx(plain.item(), rel=1e-5)
    assert predicted > 0


@by_the_compiler
def test_a_block_that_is_compiled_in_parts_is_predicted_as_it_was_written():
    model, batch = broken()
    plain = tightfit.estimate(model, batch, loss=sum_of_squares).peak_bytes
    with tightfit.compile_blocks(model, "*"):
        assert tightfit.estimate(model, batch, loss=sum_of_squares).peak_bytes == plain


@pytest.mark.keeps("dropout-compiled-blocks-draws")
@pytest.mark.slow  # compiles
@by_the_compiler
def test_random_numbers_that_would_be_drawn_anew_are_refused():
    model, batch = decoder(dropout=0.1), token_batch(2)
    model.train()
    with tightfit.compile_blocks(model, "layers.*", keep=0.0):
        with pytest.raises(CompileError, match=r"^Block: .*draws random numbers \(dropout\) again.*keep=1, or no"):
            tightfit.estimate(model, batch)
        with pytest.raises(CompileError, match="gradients would be wrong"):
            model_loss(model, batch).backward()


@pytest.mark.keeps("dropout-compiled-blocks-draws")
@pytest.mark.slow  # builds kernels for a quarter of a minute
@by_the_compiler
def test_dropout_in_compiled_blocks_drops_what_the_plain_run_drops():
    model, batch = decoder(num_layers=2, dropout=0.1), token_batch(2)
    model.train()
    outcomes = []
    for applied in (nullcontext(), tightfit.compile_blocks(model, "layers.*")):
        with applied:
            torch.manual_seed(5)
            outcomes.append((gradients(model, batch), torch.get_rng_state()))
    (plain, before), (compiled, after) = outcomes
    assert torch.equal(before, after)
    assert error(compiled, plain) < 1e-5


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


@pytest.mark.keeps("compiled-blocks-compilation-blocks")
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
@by_the_compiler
def test_a_training_with_compiled_blocks_learns_and_takes_what_was_predicted(tmp_path):
    sections = {
        "model": {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 300, "max_position_embeddings": 64},
        "data": {"max_documents": 20, "sequence_length": 64, "vocab_size": 300},
        "training": {"max_steps": 5, "learning_rate": 1e-2, "device": "cpu"},
        "memory": {"compile_blocks": True},
        "output": {"folder": str(tmp_path / "run")},
    }
    result = tightfit.train(parse_config(sections))
    assert result.last_loss < result.first_loss
    assert result.measured_peak_bytes == pytest.approx(result.predicted_peak_bytes, abs=8)
