"""Plans for cards compile blocks: their code is written here, without a card, its driver or Triton."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tightfit
from tightfit.errors import DeviceError
from tightfit.levers.captured import capture_paths
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tightfit.planner.levers import CompiledBlocks
from tightfit.runtime import compilers
from tightfit.step import Part, StepSettings, model_loss
from tightfit.tracing.compiled_code import KERNEL
from tightfit.tracing.cuda.role import CudaRole
from tightfit.tracing.step import trace_step
from tiny import decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of a card without bf16
    pytest.mark.keeps("compiled-blocks-on-a-card"),
]
LEVERS = ["recompute", "compile"]


@pytest.fixture
def model():
    return decoder(num_layers=2, hidden_size=64, vocab_size=500)


def trace_of(model, batch, policy, compiled):
    with tightfit.capture(model, "layers.*", policy=policy, compiled=compiled):
        parts = [Part(batch, 1.0)]
        return trace_step(model, parts, model_loss, settings=StepSettings("bf16"), role=CudaRole((8, 9), 128))


@pytest.mark.slow  # writes code
@pytest.mark.parametrize("policy", [KEEP_ALL, RECOMPUTE_ALL])
def test_blocks_launch_the_kernels_that_the_compiler_writes_for_the_card(model, policy):
    of_operators, fused = (trace_of(model, token_batch(4, 256), policy, each) for each in (False, True))
    names, before = ({operator.name for operator in trace.operators} for trace in (fused, of_operators))
    assert KERNEL in names - before
    assert "aten.silu.default" in before - names, "it is a part of a kernel"
    assert "aten.mm.out" in names, "products stay cuBLAS's"
    assert fused.peak_bytes <= of_operators.peak_bytes


@pytest.mark.slow  # writes code
def test_what_stands_in_for_a_card_is_gone_afterwards(model):
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties

    asked = (
        vars(CudaInterface)["get_device_properties"],
        vars(DeviceProperties)["create"],
        torch.Tensor.copy_,
        torch.cuda.get_device_properties,
    )
    trace_of(model, token_batch(4), KEEP_ALL, True)
    assert asked == (
        vars(CudaInterface)["get_device_properties"],
        vars(DeviceProperties)["create"],
        torch.Tensor.copy_,
        torch.cuda.get_device_properties,
    )


@pytest.mark.slow  # writes several sets of code
def test_a_plan_for_a_card_compiles_where_that_is_faster(model):
    recorded, compiled = (
        tightfit.plan(model, token_batch(8, 256), "0.8x", levers=each, device="rtx4090", precision="bf16")
        for each in (["recompute"], LEVERS)
    )
    assert compiled.lever(CompiledBlocks).paths == ("layers.0", "layers.1")
    assert compiled.peak_bytes <= compiled.budget_bytes
    assert compiled.step_seconds < recorded.step_seconds


@pytest.mark.slow  # writes code
def test_a_card_without_bf16_runs_as_before_and_it_is_said(model):
    plan = tightfit.plan(model, token_batch(8, 256), "0.8x", levers=LEVERS, device="t4", precision="bf16")
    assert plan.lever(CompiledBlocks) is None
    assert any("BF16 is not supported" in rejected.reason for rejected in plan.rejected)


@pytest.mark.slow  # compiles for each share
def test_without_recompute_the_compiler_chooses_what_blocks_keep(model):
    plan = tightfit.plan(model, token_batch(8, 256), "0.9x", levers=["compile"], device="rtx4090", precision="bf16")
    assert {path for path, _ in plan.lever(CompiledBlocks).shares} == {"layers.0", "layers.1"}
    assert plan.peak_bytes <= plan.budget_bytes


def test_a_card_without_triton_is_one_line(model, monkeypatch):
    monkeypatch.setattr(compilers, "has_triton_package", lambda: False)
    monkeypatch.setattr("tightfit.levers.captured.lever.device_of", lambda model: "cuda")
    policies = dict.fromkeys(("layers.0", "layers.1"), KEEP_ALL)
    with pytest.raises(DeviceError, match="compile compiles blocks, for which a card needs Triton: install"):
        capture_paths(model, policies, fused=tuple(policies))


@pytest.mark.slow  # writes code
def test_a_plan_for_a_card_needs_no_compiler_of_this_machine(model, monkeypatch):
    monkeypatch.setattr(compilers, "_COMPILERS", ("none",))
    plan = tightfit.plan(model, token_batch(8, 256), "0.8x", levers=LEVERS, device="rtx4090")
    assert plan.lever(CompiledBlocks)
    with pytest.raises(DeviceError, match="needs a C\\+\\+ compiler"):
        tightfit.plan(model, token_batch(8, 256), "0.8x", levers=LEVERS)


def with_a_cache(cls, config, **fields):
    return cls(config(vocab_size=500, use_cache=True, **fields)).train()


@pytest.mark.slow  # compiles for a CPU too
@pytest.mark.parametrize("device", ["cpu", "rtx3060"])
def test_blocks_that_return_a_cache_leave_it_as_eager_code_lies(device):
    """An empty cache and new keys make new keys, which the compiler copies as they lie; `cat` lays them out anew."""
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = with_a_cache(LlamaForCausalLM, LlamaConfig, num_hidden_layers=2, **sizes)
    ids = torch.randint(1, 500, (4, 64))
    how = {"device": device, "precision": "bf16"}
    plain = tightfit.estimate(model, {"input_ids": ids, "labels": ids}, **how)
    with tightfit.capture(model, "model.layers.*", policy=RECOMPUTE_ALL, compiled=True):
        compiled = tightfit.estimate(model, {"input_ids": ids, "labels": ids}, **how)
    assert 0 < compiled.peak_bytes < plain.peak_bytes


@pytest.mark.slow  # writes several sets of code
def test_a_plan_does_not_count_what_recording_holds():
    """A cache, in the cycle that dynamo's record of a call is."""
    model = with_a_cache(GPT2LMHeadModel, GPT2Config, n_embd=64, n_layer=3, n_head=4, n_positions=256)
    ids = torch.randint(1, 500, (4, 256))
    batch = {"input_ids": ids, "labels": ids}
    plan = tightfit.plan(model, batch, "0.7x", levers=LEVERS, device="rtx4090")
    assert plan.lever(CompiledBlocks)
    with plan.apply(model):
        assert tightfit.estimate(model, batch, device="rtx4090").peak_bytes == plan.peak_bytes
