"""Compiled blocks take the predicted bytes on a card, whose code a dry run writes without Triton and without a card."""

import copy
import functools
import gc
import os
from types import SimpleNamespace

import pytest
import torch
from three_steps import peak_of_the_third
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.levers.captured import CapturedForward
from tightfit.levers.compiled import CompiledForward
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL
from tightfit.planner.levers import CompiledBlocks
from tightfit.runtime.internals import clear_cublas_workspaces
from tightfit.tracing.build import build_dry
from tiny import decoder, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo asks it of what it is given
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within PyTorch's compiler and Triton
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what a card could do besides
    pytest.mark.usefixtures("nothing_cached"),
]


def measured(levers_on, build, batch, precision, kind=CapturedForward):
    """The peak of the third step, whose first one compiled and tuned the kernels, and the forwards of the blocks."""
    clear_cublas_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, on_card = build().cuda(), {name: tensor.cuda() for name, tensor in batch.items()}
    with levers_on(model):
        peak = peak_of_the_third(model, on_card, precision) - before
        forwards = [vars(layer).get("forward") for layer in model.layers]
    assert {type(each) for each in forwards} == {kind}
    assert all(each.fused and each.refused is None for each in forwards if kind is CapturedForward)
    return peak


@pytest.mark.slow  # inductor compiles
@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.parametrize(
    ("policy", "precision", "dropout"),
    [
        (RECOMPUTE_ALL, "bf16", 0.0),
        pytest.param(KEEP_ALL, "fp32", 0.0, marks=pytest.mark.slow),  # each compiles for half a minute
        pytest.param(KEEP_ALL, "bf16", 0.1, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_are_compiled_by_hand_take_what_was_predicted(policy, precision, dropout):
    build = lambda: decoder(num_layers=3, hidden_size=128, vocab_size=2000, dropout=dropout).train()  # noqa: E731
    batch, compiled = token_batch(8, 256), lambda m: tightfit.capture(m, "layers.*", policy=policy, compiled=True)
    model = build()
    with compiled(model):
        predicted = tightfit.estimate(model, batch, precision=precision, device="cuda").peak_bytes
    del model
    assert measured(compiled, build, batch, precision) == predicted


@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.slow  # compiles for half a minute
@pytest.mark.parametrize(("keep", "precision"), [(1.0, "bf16"), (0.5, "fp32")])
def test_blocks_that_keep_what_the_compiler_chooses_take_what_was_predicted(keep, precision):
    build = lambda: decoder(num_layers=3, hidden_size=128, vocab_size=2000)  # noqa: E731
    batch, model = token_batch(8, 256), build()
    with tightfit.compile_blocks(model, "layers.*", keep=keep):
        predicted = tightfit.estimate(model, batch, precision=precision, device="cuda").peak_bytes
    del model
    compiled = lambda m: tightfit.compile_blocks(m, "layers.*", keep=keep)  # noqa: E731
    assert measured(compiled, build, batch, precision, CompiledForward) == predicted


@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.skipif("TIGHTFIT_NULLCARD" in os.environ, reason="a null card computes nothing")
@pytest.mark.parametrize("policy", [KEEP_ALL, RECOMPUTE_ALL])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_as_exact_as_plain_ones(policy, precision):
    model = decoder(num_layers=3, hidden_size=128, vocab_size=2000).cuda()
    batch = {name: tensor.cuda() for name, tensor in token_batch(8, 256).items()}

    def gradients(of, precision):
        of.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = of(**batch).loss
        loss.backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in of.parameters()])

    truth = gradients(copy.deepcopy(model).double(), "fp64")
    plain = gradients(model, precision)
    with tightfit.capture(model, "layers.*", policy=policy, compiled=True):
        compiled = gradients(model, precision)
    assert 0 < (compiled - truth).norm() <= 1.05 * (plain - truth).norm()


@pytest.mark.keeps("compiled-blocks-on-a-card")
@pytest.mark.slow  # writes several sets of code, and compiles one
@pytest.mark.parametrize(("precision", "budget"), [("bf16", "0.7x"), ("fp32", "0.7x")])
def test_a_plan_that_compiles_takes_its_peak(precision, budget):
    build = lambda: decoder(num_layers=4, hidden_size=128, vocab_size=2000)  # noqa: E731
    batch = token_batch(8, 256)
    levers = ["recompute", "compile"]
    plan = tightfit.plan(build_dry(build), batch, budget, levers=levers, precision=precision, device="cuda")
    assert plan.lever(CompiledBlocks).paths == tuple(f"layers.{n}" for n in range(4))
    assert measured(plan.apply, build, batch, precision) == plan.peak_bytes <= plan.budget_bytes


# FlexAttention that a model calls under `torch.compile`


class Flexible(nn.Module):
    """Attention with a residual sum, and what its variant does besides."""

    def __init__(self, variant):
        super().__init__()
        self.variant, self.heads = variant, (4, 2 if variant == "grouped" else 4, 2 if variant == "grouped" else 4)
        self.qkv, self.out = nn.Linear(256, 64 * sum(self.heads)), nn.Linear(256, 256)

    def forward(self, x, mask):
        parts = self.qkv(x).split([64 * heads for heads in self.heads], -1)
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        if self.variant == "contiguous":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        aux = AuxRequest(lse=True) if self.variant == "sums" else None
        y = compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True, return_aux=aux)
        if aux is not None:
            y = y[0] * y[1].lse.sigmoid()[..., None].to(y[0].dtype)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Attending(nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.variant, self.head = variant, nn.Linear(256, 8)
        self.layers = nn.ModuleList(Flexible(variant) for _ in range(3))

    def forward(self, x):
        length = x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=x.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=False) if self.variant == "checkpoints" else layer(x, mask)
        return SimpleNamespace(loss=self.head(x).square().mean())


@functools.cache
def compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


@pytest.mark.keeps("flex-attention-predicted")
@pytest.mark.usefixtures("growing_segments")  # else what compiling left in the cache decides which blocks stay unsplit
@pytest.mark.parametrize(
    ("variant", "precision"),
    [
        ("transposed", "bf16"),
        pytest.param("transposed", "fp32", marks=pytest.mark.slow),  # each compiles for seconds
        pytest.param("contiguous", "bf16", marks=pytest.mark.slow),
        pytest.param("grouped", "bf16", marks=pytest.mark.slow),
        pytest.param("sums", "bf16", marks=pytest.mark.slow),
        pytest.param("checkpoints", "bf16", marks=pytest.mark.slow),
    ],
)
def test_flex_attention_of_the_users_takes_what_was_predicted(variant, precision):
    batch = {"x": torch.zeros(2, 1024, 256)}
    predicted = tightfit.estimate(Attending(variant), batch, precision=precision, device="cuda").peak_bytes
    clear_cublas_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, on_card = Attending(variant).cuda(), {"x": batch["x"].cuda()}
    peak_of_the_third(model, on_card, precision)
    model.zero_grad()
    gc.collect()  # dynamo's record of the first call holds its arguments
    assert peak_of_the_third(model, on_card, precision) - before == predicted
