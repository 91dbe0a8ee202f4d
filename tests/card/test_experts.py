"""Fused experts in few bits, and adapters of their weights, take the bytes on a card that a dry run predicts."""

import copy
import gc
import json

import pytest
import torch
import transformers
from three_steps import peak_of_the_third

import tightfit
from tightfit.devices.nullcard.deciding import true_decisions
from tightfit.models.adapters import add_adapter
from tightfit.runtime.internals import clear_cublas_workspaces
from tightfit.step import TokenBatch
from tightfit.training.config import AdapterConfig

pytestmark = pytest.mark.usefixtures("null_card")

SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 256, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "num_experts": 8,
}  # fmt: skip


@pytest.mark.keeps("experts-few-bits-adapted")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapted", ["attention", "experts"])
@pytest.mark.parametrize("base", ["int8", "fp8", "nf4"])
def test_they_take_the_predicted_bytes(base, adapted, precision, tmp_path):
    path = tmp_path / "lora.json"
    of_experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if adapted == "experts" else None
    path.write_text(json.dumps({"target_modules": ["q_proj", "v_proj"], "target_parameters": of_experts, "r": 8}))
    torch.manual_seed(0)
    plain = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SHAPE))
    model = add_adapter(plain, AdapterConfig(base=base, config=str(path))).train()
    batch = TokenBatch(4, 96, 1000).tensors()
    predicted = tightfit.estimate(copy.deepcopy(model), batch, optimizer="adamw", precision=precision, device="cuda")
    clear_cublas_workspaces()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model, batch = model.cuda(), {name: tensor.cuda() for name, tensor in batch.items()}
    with true_decisions():
        peak = peak_of_the_third(model, batch, precision) - before
    assert peak == predicted.peak_bytes
