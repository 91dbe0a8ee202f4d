"""FlexAttention's wiring, on a CPU: what its kernels are given, and that what surrounds them is right.

The kernels themselves need CUDA. A dense stand-in reads the block mask as they do: a pair outside of the listed blocks
is not seen, and in a full block all are.
"""

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import OperatorLog, results
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from tightfit import recompute
from tightfit.levers.micro_batch import as_parts
from tightfit.ops import attention, flex
from tightfit.ops.attention import plain_attention
from tightfit.tracing.cuda import CudaRole
from tightfit.tracing.step import trace_step
from tiny import Stack

HOPPER = CudaRole((9, 0), 132)
LIMITS = [
    (True, None),
    (True, 1),
    (True, 100),
    (True, 128),
    (True, 129),
    (True, 300),
    (False, 1),
    (False, 129),
    (False, 200),
]
limits = pytest.mark.parametrize(("causal", "window"), LIMITS)


def sample(queries=300, keys=300, width=16):
    generator = torch.Generator().manual_seed(0)
    sizes = [(4, queries), (2, keys), (2, keys)]
    return [torch.randn(2, heads, length, width, generator=generator) for heads, length in sizes]


def documents(length=300, kind="packed"):
    ids = torch.arange(length) // 90 if kind == "packed" else torch.arange(length) % 3
    return torch.stack((ids, ids.flip(0)))


@pytest.mark.keeps("cuda-flexattention-gets-block")
@limits
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (256, 256), (128, 500), (500, 70)])
def test_the_blocks_are_those_that_looking_at_all_pairs_finds(causal, window, queries, keys):
    q, k, _ = sample(queries, keys)
    ours = flex.block_mask(q, k, None, causal, window)
    theirs = create_block_mask(ours.mask_mod, 1, 1, queries, keys, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


@limits
@pytest.mark.parametrize("kind", ["packed", "interleaved"])
def test_with_documents_no_block_that_holds_something_to_see_is_left_out(causal, window, kind):
    q, k, _ = sample()
    ours = flex.block_mask(q, k, documents(kind=kind), causal, window)
    theirs = create_block_mask(ours.mask_mod, 2, 1, 300, 300, device="cpu")
    assert (ours.to_dense() >= theirs.to_dense()).all()
    assert ours.full_kv_num_blocks is None


def test_blocks_of_other_documents_are_left_out():
    q, k, _ = sample(1024, 1024)
    ids = (torch.arange(1024) // 256).expand(2, -1)
    blocks = flex.block_mask(q, k, ids, True, None).to_dense()
    assert blocks.sum() == 2 * 4 * 3  # rows, documents, blocks on or below the diagonal of two by two


def dense_flex_attention(q, k, v, *, block_mask, scale, enable_gqa):
    """What FlexAttention computes, from the blocks that are listed and the function that judges pairs."""
    visible = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    block_mask.mask_mod = None
    blocks = block_mask.to_dense().bool()
    for size, dim in ((q.shape[2], 2), (k.shape[2], 3)):
        blocks = blocks.repeat_interleave(flex.BLOCK, dim=dim).narrow(dim, 0, size)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible & blocks, scale=scale, enable_gqa=enable_gqa)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The operators have their kernels on the CPU too, over a dense FlexAttention, and are chosen there."""
    library = torch.library.Library("tightfit", "IMPL")
    library.impl("window_attention", flex._forward, "CPU")
    library.impl("window_attention_backward", flex._backward, "CPU")
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: dense_flex_attention)
    monkeypatch.setattr(flex, "serves", lambda q, v: True)
    yield
    library._destroy()


@pytest.mark.keeps("cuda-flexattention-gets-block")
@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("limit", [(True, 40), (True, 150), (False, 150), (True, None)])
@pytest.mark.parametrize("kind", [None, "packed", "interleaved"])
def test_output_and_gradients_are_the_plain_ones(limit, kind):
    causal, window = limit
    how = {"causal": causal, "window": window, "document_ids": None if kind is None else documents(kind=kind)}
    with OperatorLog() as log:
        mine = results(lambda *t: attention(*t, **how), sample(), torch.float64)
    plain = results(lambda *t: plain_attention(*t, **how), sample(), torch.float64)
    for ours, theirs in zip(mine, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    wanted = [] if window is None and kind is None else ["window_attention", "window_attention_backward"]
    assert [name for name in log.names if name.startswith("window")] == wanted


class Windowed(nn.Module):
    """A block of attention within a window."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.projection(x).chunk(3, dim=-1))
        return x + attention(q, k, v, causal=True, window=20).transpose(1, 2).flatten(2)


def stack():
    torch.manual_seed(0)
    return Stack(Windowed(), Windowed())


def loss(model, batch):
    return model(batch["x"]).square().sum()


def gradients(model):
    model.zero_grad()
    loss(model, {"x": torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(1))}).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.keeps("cuda-flexattention-gets-block")
@pytest.mark.usefixtures("on_a_cpu")
def test_recomputed_it_gives_the_same_bits():
    model = stack()
    plain = gradients(model)
    with recompute(model, "layers.*"), OperatorLog() as log:
        recomputed = gradients(model)
    assert all(map(torch.equal, recomputed, plain))
    assert log.names.count("window_attention_backward") == 2


def test_a_dry_run_for_cuda_meets_the_operators_of_cuda_and_keeps_only_their_inputs():
    batch = {"x": torch.randn(2, 4096, 32)}
    names = [record.name for record in trace_step(stack(), as_parts([batch], loss), loss, role=HOPPER).operators]
    assert names.count("tightfit.window_attention.default") == 2
    assert names.count("tightfit.window_attention_backward.default") == 2


def test_a_cpu_takes_the_chunks():
    q, k, v = sample()
    with OperatorLog() as log:
        attention(q, k, v, causal=True, window=20)
    assert "window_attention" not in log.names
    assert "amax" in log.names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler, where it is first loaded
@pytest.mark.slow  # compiles a kernel of the CPU, some 20 s
def test_the_compiled_kernel_of_the_cpu_reads_the_blocks_as_we_do():
    q, k, v = (t.repeat(1, 1, 1, 2) for t in sample())
    how = {"causal": True, "window": 40, "document_ids": documents()}
    blocks = flex.block_mask(q, k, how["document_ids"], True, 40)
    compiled = torch.compile(flex_attention, fullgraph=True)
    with torch.no_grad():
        output = compiled(q, k, v, block_mask=blocks, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(output, plain_attention(q, k, v, scale=0.2, **how), rtol=1e-5, atol=1e-5)
