"""A record that was made with few of a model's equal blocks is that of all, in every figure; or there is none."""

import pytest
import torch
import transformers
from torch import nn

from tightfit.devices.present import lookup
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.models.variants import as_recipe
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.levers import Stream
from tightfit.planner.request import Request
from tightfit.recipes import whole_step
from tightfit.recipes.whole_step import PartTracer
from tightfit.step import TokenBatch
from tightfit.tracing.equal_blocks import equal_blocks, traced_with_few
from tightfit.tracing.step import trace_part
from tightfit.training.config.schema import AdapterConfig

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
BATCH = TokenBatch(2, 16, 64)


def llama(layers=12, **settings):
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, num_key_value_heads=2, **settings)
    return transformers.LlamaForCausalLM(config)


def qwen_of_experts():
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_hidden_layers=9, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
        moe_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gemma_of_two_kinds():
    """Layers with a window and without take turns."""
    config = transformers.Gemma2Config(
        **SIZES, num_hidden_layers=14, num_key_value_heads=2, head_dim=8, sliding_window=8
    )
    return transformers.Gemma2ForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=8, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def own():
    return Decoder(DecoderConfig(hidden_size=32, num_layers=11, num_heads=2, vocab_size=64))


def adapted():
    return as_recipe(llama(), dtype="bf16", adapter=AdapterConfig(r=4, base="bf16"))


MODELS = {each.__name__: each for each in (llama, qwen_of_experts, gemma_of_two_kinds, own, adapted)}


def tracer_of(model, device, *, frees=False, batch=BATCH):
    request = Request.of(model=model, batch=batch, device=lookup(device), levers="rounding").checked(may_choose=True)
    return PartTracer(request, frees=frees)


@pytest.fixture
def ran(monkeypatch):
    """The number of modules of the model of each dry run."""
    found = []

    def noted(model, *args, **kwargs):
        found.append(len(list(model.modules())))
        return trace_part(model, *args, **kwargs)

    monkeypatch.setattr(whole_step, "trace_part", noted)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("device", "frees"), [("cpu", False), ("rtx4090", True)])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.keeps("few-of-equal-blocks-stand-for-all")
def test_few_blocks_give_the_record_of_all(name, frees, device, ran):
    model = MODELS[name]()
    blocks = find_blocks(model)
    for policies in ({}, dict.fromkeys(blocks, KEEP_ALL), dict.fromkeys(blocks, RECOMPUTE_ALL)):
        tracer = tracer_of(model, device, frees=frees)
        whole = tracer.whole(tracer.request.plain, policies)
        assert tracer.equal.may, "the first trace was made both ways, and they are the same"
        ran.clear()
        assert tracer.whole(tracer.request.plain, policies) == whole
        (modules,) = ran
        assert modules < 0.85 * len(list(model.modules())), "some blocks were left out"


@pytest.mark.slow  # traces with and without
def test_blocks_with_different_levers_are_not_equal(ran):
    model = llama(24)
    blocks = find_blocks(model)
    tracer = tracer_of(model, "rtx4090")
    assert tracer.whole(tracer.request.plain, {})
    policies = dict.fromkeys(blocks[:12], RECOMPUTE_ALL) | dict.fromkeys(blocks[12:], KEEP_ALL)
    ran.clear()
    few = tracer.whole(tracer.request.plain, policies)
    assert len(ran) == 1
    tracer.equal.may = False
    assert tracer.whole(tracer.request.plain, policies) == few
    assert ran[1] > ran[0]


@pytest.mark.slow  # two traces of every block
@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [24, 12])
def test_streamed_blocks_come_and_go_as_in_the_whole_model(count, ran):
    model = as_recipe(llama(24, max_position_embeddings=64), dtype="bf16", adapter=AdapterConfig(r=4, base="bf16"))
    tracer, blocks = tracer_of(model, "rtx4090"), find_blocks(model)
    assert tracer.whole(tracer.request.plain, {})
    streamed = blocks if count == 24 else blocks[:count]
    combination = tracer.request.plain.with_lever(Stream.of(model, streamed))
    ran.clear()
    few = tracer.whole(combination, dict.fromkeys(blocks, RECOMPUTE_ALL))
    tracer.equal.may = False
    assert tracer.whole(combination, dict.fromkeys(blocks, RECOMPUTE_ALL)) == few
    assert ran[0] < ran[-1] or count == 12
    assert few.host_by_category


class Odd(nn.Module):
    """Blocks in a loop of its own kind."""

    def __init__(self, kind, layers=12):
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(layers))
        self.head, self.kind = nn.Linear(16, 64), kind

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        kept = []
        layers = list(self.layers)
        if self.kind == "the other way round":
            layers = layers[::-1]
        for number, layer in enumerate(layers):
            before = x
            x = layer(x)
            if self.kind == "every fourth" and number % 4 == 3:
                x = x + before
            if self.kind == "to the end":
                kept.append(x)
            if self.kind == "to the other side":
                kept.append(x)
                if number >= len(layers) / 2:
                    x = x * kept[len(layers) - 1 - number]
            if self.kind == "twice":
                x = layer(x)
        if self.kind == "to the end":
            x = torch.stack(kept).mean(0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "kind", ["plain", "every fourth", "to the end", "to the other side", "twice", "the other way round"]
)
@pytest.mark.parametrize("layers", [9, 12, 17])
def test_a_model_that_treats_equal_blocks_differently_is_run_whole(kind, layers):
    model = Odd(kind, layers)
    tracer = tracer_of(model, "rtx4090")
    whole = tracer.whole(tracer.request.plain, {})
    assert tracer.equal.may is (kind == "plain")
    policies = dict.fromkeys(find_blocks(model), RECOMPUTE_ALL)
    found = tracer.whole(tracer.request.plain, policies)
    tracer.equal.may = False
    assert tracer.whole(tracer.request.plain, policies) == found
    assert tracer.whole(tracer.request.plain, {}) == whole


def test_what_an_encoder_gives_to_every_block_of_a_decoder_stays_right():
    model = t5()
    batch = {name: torch.zeros(2, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    tracer = tracer_of(model, "cpu", batch=batch)
    first = tracer.whole(tracer.request.plain, {})
    assert tracer.whole(tracer.request.plain, {}) == first


def test_blocks_of_another_width_or_with_a_hook_are_kept():
    def none(path):
        return None

    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(12)]
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    (run,) = equal_blocks(model, none)
    assert (len(run.left), len(run.out)) == (5, 7)
    layers[0][0] = nn.Linear(8, 8, bias=False)
    (run,) = equal_blocks(model, none)
    assert (len(run.left), len(run.out)) == (5, 6)
    layers[6].register_forward_hook(lambda *_: None)
    assert equal_blocks(model, none) == [], "on each side of the hook are as many as are run anyway"
    assert traced_with_few(model, none, pytest.fail) is None


def test_the_model_is_whole_again_after_a_run_that_fails():
    model = llama()

    def fails(left):
        assert len(model.model.layers) == 5
        assert [left(f"model.layers.{n}") for n in range(12)] == [True] * 3 + [False] * 7 + [True] * 2
        assert not left("model.layers.4.mlp")
        raise KeyError("a block that is not there")

    assert traced_with_few(model, lambda path: None, fails) is None
    assert len(model.model.layers) == 12
