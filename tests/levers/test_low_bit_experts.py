"""Fused experts in few bits: the weights that they stand for, the peak, whoever the tokens go to, and plans."""

import copy
import json
from collections import Counter

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from command_line import tightfit
from tightfit import TokenBatch, estimate
from tightfit.errors import ModelError
from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.models.adapters import adapter_state, add_adapter, load_adapter, merged, save_adapter
from tightfit.models.published import published
from tightfit.ops.weights.experts import PRODUCT, LowBitExperts, freeze_experts, fused_experts, multiplied
from tightfit.ops.weights.low_bit import at_full_width, count_weights, freeze_in_low_bits, frozen_base
from tightfit.step import StepSettings
from tightfit.tracing.build import build_dry
from tightfit.tracing.dry_run import DryRun
from tightfit.tracing.ledger import Ledger
from tightfit.tracing.modules import ModuleTracker
from tightfit.tracing.step import trace_inference
from tightfit.training.config import AdapterConfig
from tiny import allocator_peak, demand_exact_plan

SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = ["int8", "fp8", "nf4"]


def qwen():
    config = transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=8)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss():  # transposed, with biases, and a gate of its own
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SHAPE, num_local_experts=4))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, num_local_experts=4))


MODELS = [qwen, gpt_oss, mixtral]


def made(model, seed=0):
    torch.manual_seed(seed)
    return model().train()


def adapted(model, base, **keys):
    found = add_adapter(made(model), AdapterConfig(base=base, r=4, **keys)).train()
    torch.manual_seed(2)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return found


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_experts_compute_with_the_weights_that_their_codes_stand_for(model, kind):
    low = made(model)  # the layers that route stay as they are: rounding there sends a token to another expert
    for experts in fused_experts(low).values():
        freeze_experts(experts, kind)
    wide = at_full_width(copy.deepcopy(low))
    assert any(isinstance(module, LowBitExperts) for module in low.modules())
    assert not any(isinstance(module, LowBitExperts) for module in wide.modules())
    # The experts alone, on one input: a last digit of attention's products would let the router choose others.
    x = torch.randn(2, 40, SHAPE["hidden_size"], requires_grad=True)
    results = [m.model.layers[0].mlp(x) for m in (low, wide)]
    results = [result[0] if isinstance(result, tuple) else result for result in results]
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def of_codes(packed, shape):
    """The weights of 4-bit codes by the definition, one after the other."""
    codes, state = packed.data.view(-1), packed.quant_state
    values = state.code[torch.stack([codes >> 4, codes & 15], dim=1).view(-1).long()]
    return (values.view(-1, state.blocksize) * state.absmax[:, None]).view(shape)


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize("inputs", [32, 64, 96])
def test_rows_that_end_within_a_block_of_codes_are_read_rightly(inputs):
    experts = made(lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=inputs, num_experts=4)
    )).model.layers[0].mlp.experts  # fmt: skip
    freeze_in_low_bits(torch.nn.ModuleDict({"experts": experts, "linear": torch.nn.Linear(64, 64)}), "nf4")
    right = of_codes(experts.down_proj, (4, 64, inputs))
    held = experts.held("down_proj")
    assert torch.equal(held.wide(0, 4, torch.float32), right)
    assert all(torch.equal(held.wide(each, each + 1, torch.float32)[0], right[each]) for each in range(4))

    linear = torch.nn.Sequential(torch.nn.Linear(inputs, 64, bias=False))
    freeze_in_low_bits(linear, "nf4")
    right = of_codes(linear[0].weight, (64, inputs))
    x = torch.randn(3, inputs, requires_grad=True)
    torch.testing.assert_close(linear(x), x @ right.T, rtol=0.05, atol=0.05)  # some processors multiply in 16 bits
    plain = torch.autograd.grad((x @ right.T).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(linear(x).square().sum(), x)[0], plain, rtol=0.05, atol=0.5)
    assert torch.equal(at_full_width(linear)[0].weight, right)


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize(("kind", "each"), [("int8", 1.0), ("fp8", 1.0), ("nf4", 0.5)])
def test_they_take_the_bytes_of_their_codes_and_scales(kind, each):
    experts = made(qwen).model.layers[0].mlp.experts
    counts = [p.numel() for p in experts.parameters()]
    rows = 8 * (64 + 64)
    freeze_in_low_bits(holder := torch.nn.ModuleDict({"experts": experts, "linear": torch.nn.Linear(64, 64)}), kind)
    held = list(holder["experts"].parameters())
    scales = sum(counts) // 64 if kind == "nf4" else rows
    table = 2 * 16 if kind == "nf4" else 0  # of NormalFloat's values, for each weight
    assert storage_bytes([*held, *(s for p in held for s in scales_of(p))]) == each * sum(counts) + 4 * (scales + table)
    if kind == "nf4":
        assert count_weights(holder["experts"]) == sum(counts)


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_predicted_peak_is_the_allocators(model, kind, precision):
    adapters, batch = adapted(model, kind), TokenBatch(2, 48, 300).tensors()
    found = estimate(adapters, batch, precision=precision)
    measured = allocator_peak(adapters, batch, settings=StepSettings(precision))
    assert found.peak_bytes == pytest.approx(measured, rel=1e-3)


@pytest.mark.slow  # a plan for each kind
@pytest.mark.sampled(1)
@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_plan_of_adapters_beside_them_changes_no_bit(kind):
    demand_exact_plan(adapted(qwen, kind), TokenBatch(4, 48, 300).tensors(), "0.7x")


@pytest.mark.keeps("experts-few-bits")
def test_the_peak_is_the_same_whoever_the_tokens_go_to():
    adapters, batch = adapted(qwen, "int8"), TokenBatch(2, 48, 300).tensors()
    balanced = allocator_peak(adapters, batch)
    for layer in adapters.base_model.model.model.layers:
        layer.mlp.gate.weight.data[2:].zero_()  # ties go to the first
        layer.mlp.gate.weight.data[:2] = 0
    assert allocator_peak(adapters, batch) == balanced


class Called(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_calls_the_same_operators_whoever_the_tokens_go_to(kind):
    block = made(qwen).model.layers[0].mlp.requires_grad_(False)
    freeze_experts(block.experts, kind)
    called = []
    for chosen in (8, 2):  # of the experts; recompute and plans count operators by name
        block.gate.weight.data[chosen:] = -100.0
        with Called() as counted:
            block(torch.rand(1, 24, 64).requires_grad_())[0].sum().backward()
        called.append(counted.names)
    assert called[0] == called[1]
    assert called[0][str(PRODUCT)] == 4  # two products in forward and two in backward


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize("kind", KINDS)
def test_the_price_of_a_product_is_that_of_the_operators_in_its_loop(kind):
    layer = made(qwen).model.layers[0]
    freeze_experts(layer.mlp.experts, kind)
    held = layer.mlp.experts.held("down_proj")
    rows, ends = torch.rand(40, 32), [5, 12, 12, 20, 21, 30, 39, 40]
    with Called() as counted:
        multiplied(rows, held.codes, held.scale, held.shape, held.block, ends, False)
    free = ("split", "unbind", "slice", "view", "transpose", "unsqueeze", "select", "detach", "_unsafe", "t.default")
    priced = sum(number for name, number in counted.names.items() if not any(f".{view}" in name for view in free))
    arguments = (rows, held.codes, held.scale, held.shape, held.block, ends, False)
    trace = trace_inference(layer.mlp.experts, rows, lambda model, batch: PRODUCT(batch, *arguments[1:]))
    (product,) = [each for each in trace.operators if each.name == str(PRODUCT)]
    assert product.workspace_bytes >= held.shape[1] * held.shape[2] * 4  # an expert at full width
    with ModuleTracker(layer) as modules, DryRun(Ledger(), modules, cost=lambda *call: 1.0) as dry:
        seconds, scratch = dry.price_of_loop(multiplied, arguments)
    assert seconds == priced
    assert scratch == product.workspace_bytes


@pytest.mark.parametrize("layers", [None, "all-linear"])
@pytest.mark.parametrize("model", MODELS)
def test_adapters_on_them_are_on_linear_layers_alone(model, layers):
    adapters = adapted(model, "nf4", target_modules=layers)
    adapted_to = {
        path.split(".lora_")[0].rpartition(".")[2] for path, _ in adapters.named_parameters() if "lora_" in path
    }
    assert adapted_to <= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted_to


ON_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted_experts(model, base, folder, seed=2, **keys):
    """Adapters on one projection and on the experts' weights, by a file."""
    path = folder / "lora.json"
    named = {"target_modules": ["q_proj"], "target_parameters": ON_EXPERTS, "r": 4, "lora_alpha": 8}
    path.write_text(json.dumps({**named, **keys}))
    found = add_adapter(made(model), AdapterConfig(base=base, config=str(path))).train()
    torch.manual_seed(seed)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return found


def first_layer(model):
    return model.base_model.model.model.layers[0].mlp


@pytest.mark.sampled(6)
@pytest.mark.keeps("experts-few-bits-adapted")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_adapters_of_their_weights_are_those_of_peft_beside_the_same_weights_at_full_width(
    model, kind, rslora, tmp_path
):
    low = adapted_experts(model, kind, tmp_path, use_rslora=rslora)
    wide = at_full_width(copy.deepcopy(low))
    assert not any(isinstance(module, LowBitExperts) for module in wide.modules())
    x = torch.randn(2, 40, SHAPE["hidden_size"], requires_grad=True)
    found = []
    for layer in map(first_layer, (low, wide)):
        result = layer(x)
        result = result[0] if isinstance(result, tuple) else result
        factors = [p for name, p in layer.named_parameters() if "lora_" in name]
        assert len(factors) == 4
        found.append((result, *torch.autograd.grad(result.square().sum(), [x, *factors])))
    for mine, others in zip(*found, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5)
    with low.disable_adapter():
        result = first_layer(low)(x)
    assert not torch.allclose(result[0] if isinstance(result, tuple) else result, found[0][0])


@pytest.mark.keeps("experts-few-bits-adapted")
def test_names_of_experts_before_they_were_fused_are_their_weights(tmp_path):
    named = AdapterConfig(base="nf4", r=4, target_modules=("w1", "w2", "w3"))
    assert set(frozen_base(add_adapter(made(mixtral), named)).adapted) == {"gate_up_proj", "down_proj"}


@pytest.mark.keeps("experts-few-bits-adapted")
@pytest.mark.parametrize("base", KINDS)
def test_their_adapters_are_written_and_read_as_pefts(base, tmp_path):
    trained = adapted_experts(qwen, base, tmp_path)
    save_adapter(trained, tmp_path)
    again = made(qwen)
    freeze_in_low_bits(again, base)
    again = load_adapter(again, tmp_path).train()
    batch = TokenBatch(2, 16, 300).tensors()
    assert torch.equal(again(**batch).loss, trained(**batch).loss)
    again(**batch).loss.backward()
    assert all(p.grad is not None for name, p in again.named_parameters() if "lora_" in name)
    wide = load_adapter(made(qwen), tmp_path)  # peft's own
    assert adapter_state(wide).keys() == adapter_state(again).keys()


@pytest.mark.sampled(1)
@pytest.mark.keeps("experts-few-bits-adapted")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_predicted_peak_of_their_adapters_is_the_allocators(kind, precision, tmp_path):
    adapters, batch = adapted_experts(qwen, kind, tmp_path), TokenBatch(2, 48, 300).tensors()
    found = estimate(adapters, batch, precision=precision)
    measured = allocator_peak(adapters, batch, settings=StepSettings(precision))
    counters = 4 * sum(p.requires_grad for p in adapters.parameters())  # of AdamW's steps, on the host of a card
    assert found.peak_bytes + counters == measured
    assert "Adapters are on down_proj, gate_up_proj, q_proj." in str(found)


@pytest.mark.sampled(1)
@pytest.mark.keeps("experts-few-bits-adapted")
@pytest.mark.parametrize("kind", ["nf4", "fp8"])
def test_a_plan_of_their_adapters_changes_no_bit(kind, tmp_path):
    demand_exact_plan(adapted_experts(qwen, kind, tmp_path), TokenBatch(4, 48, 300).tensors(), "0.7x")


def test_their_adapters_stay_beside_codes(tmp_path):
    adapters = adapted_experts(mixtral, "nf4", tmp_path)
    with pytest.raises(ModelError, match="few bits"):
        merged(adapters)
    with pytest.raises(ModelError, match=r"adapters of \w+_proj cannot be merged into its codes in few bits"):
        first_layer(adapters).experts.merge()


@pytest.mark.keeps("experts-few-bits")
@pytest.mark.parametrize(("width", "coded"), [(36, []), (40, ["gate_up_proj"])])
def test_experts_that_fill_no_whole_blocks_stay_as_they_are_in_four_bits(width, coded, tmp_path):
    shape = {**SHAPE, "hidden_size": width, "moe_intermediate_size": 4, "num_experts": 4}
    low = adapted_experts(lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape)), "nf4",
                          tmp_path)  # fmt: skip
    wide = at_full_width(copy.deepcopy(low))
    experts = [first_layer(m).experts for m in (low, wide)]
    assert list(experts[0].get_base_layer().wide_shapes) == coded
    x, chosen, shares = torch.randn(6, width), torch.randint(4, (6, 2)), torch.rand(6, 2)
    torch.testing.assert_close(*(each(x, chosen, shares) for each in experts))


@pytest.mark.keeps("base-not-quantised-said")
def test_an_estimate_says_what_a_base_in_few_bits_does_not_reach():
    adapters, batch = adapted(qwen, "nf4"), TokenBatch(2, 16, 300)
    found = estimate(adapters, batch, device="rtx4090")
    frozen = [p for p in adapters.parameters() if not p.requires_grad]
    assert found.base_bytes == storage_bytes([*frozen, *(s for p in frozen for s in scales_of(p))])
    assert found.not_quantised["model.embed_tokens"] == 300 * 64 * 4
    assert found.not_quantised["model.layers.*.mlp.gate"] == 3 * 8 * 64 * 4
    assert not any("experts" in name or "proj" in name for name in found.not_quantised)
    assert "model.embed_tokens 75.00 KiB" in " ".join(str(found).partition("Peak")[0].split())
    assert "Adapters are on k_proj, o_proj, q_proj, v_proj." in str(found)


def test_a_base_of_one_width_has_nothing_to_say():
    found = estimate(adapted(mixtral, "bf16"), TokenBatch(2, 16, 300), device="rtx4090")
    assert found.base_bytes
    assert found.not_quantised == {}
    assert estimate(made(mixtral), TokenBatch(2, 16, 300), device="rtx4090").base_bytes == 0


@pytest.mark.slow  # 48 layers of 128 experts
@pytest.mark.keeps("experts-few-bits")
def test_a_30b_of_experts_takes_at_most_20_gb_in_four_bits():
    asked = ("--model", "qwen3-30b-a3b", "--adapter", "r=16,alpha=32", "--base", "nf4")
    found = json.loads(tightfit("estimate", *asked, "--device", "h100", "--seq-len", 128, "--json").out)
    assert found["by_category"]["parameters"] <= 20e9
    assert found["base_bytes"] > 18e9
    assert max(found["not_quantised"], key=found["not_quantised"].get) in ("model.embed_tokens", "lm_head")


@pytest.mark.slow  # 46 layers of 64 experts
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")  # its new name is younger than transformers 5.0
@pytest.mark.keeps("experts-few-bits")
def test_a_published_30b_of_experts_takes_what_four_bits_say_and_the_step_near_what_was_published():
    """axolotl states 23 GiB reserved for GLM-4.7-Flash (examples/glm47-flash/qlora.yaml: rank 32, 2 x 2048 tokens, full
    checkpoints, no whole logits). It widens all experts of a layer at once, which a product here does not: 1.125 GiB.
    """
    fields = dict(published()["glm-4.7-flash"].config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)

    def build():
        model = AutoModelForCausalLM.from_config(config)
        model.gradient_checkpointing_enable()
        return add_adapter(model, AdapterConfig(r=32, alpha=16, target_modules=("o_proj",), base="nf4"))

    model = build_dry(build).train()
    apply_chunked_loss(model, "base_model.model.lm_head", 16)
    batch = TokenBatch(2, 2048, config.vocab_size)
    found = estimate(model, batch, optimizer="adamw8bit", precision="bf16", device="rtxa6000")
    assert 17.5 < found.step_figures.by_category["parameters"] / 2**30 < 18
    widened = 64 * (3072 * 2048 + 2048 * 1536) * 2
    assert found.reserved_bytes + widened == pytest.approx(23 * 2**30, rel=0.05)
