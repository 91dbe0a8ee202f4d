"""With true values a step on a null card computes what a CPU computes, and refuses by name what it cannot."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from exactness import bits
from tightfit.devices.nullcard.values import NotComputed

pytestmark = pytest.mark.usefixtures("values")


class Mixer(nn.Module):
    """Embedding, norms, products, a softmax of scores and a loss over a vocabulary: one kernel each on CPU and card."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        scores = (x @ x.transpose(-1, -2)).softmax(-1)
        return F.cross_entropy(self.head(scores @ x + self.mlp(x)).flatten(0, 1), ids.flatten())


def test_loss_gradients_and_an_update_are_the_cpus_bit_for_bit():
    torch.manual_seed(0)
    here, ids = Mixer(), torch.randint(50, (3, 16))
    there = copy.deepcopy(here).cuda()
    losses = []
    for model, batch in ((here, ids), (there, ids.cuda())):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach().cpu())
    assert torch.equal(*losses)
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(bits(p.grad), bits(q.grad.cpu()))
        assert torch.equal(bits(p), bits(q.cpu()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_is_as_near_to_fp64_as_rounding_allows(dtype, heads):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, 32, dtype=dtype) for h in (4, heads, heads))
    found = []
    for device, width in (("cuda", dtype), ("cpu", torch.float64)):
        own = [x.to(device, width).requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=heads != 4)
        out.square().sum().backward()
        found.append([x.detach().cpu().double() for x in (out, *(x.grad for x in own))])
    for got, true in zip(*found, strict=True):
        torch.testing.assert_close(got, true, rtol=0, atol=4 * torch.finfo(dtype).eps * true.abs().max().item())


def test_dropout_repeats_where_the_generator_is_put_back():
    x = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(3)
    first, second = F.dropout(x, 0.5), F.dropout(x, 0.5)
    torch.cuda.manual_seed(3)
    again = F.dropout(x, 0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert 300 < first.count_nonzero().item() < 700


def test_attentions_dropout_is_the_same_in_backward():
    torch.manual_seed(1)
    q = torch.randn(1, 2, 16, 16, device="cuda", requires_grad=True)
    v = torch.eye(16, device="cuda").expand(1, 2, 16, 16).contiguous().requires_grad_()
    weights = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)  # with v = 1, the result is the kept weights
    (grad,) = torch.autograd.grad(weights.sum(), v)
    torch.testing.assert_close(grad.sum(-1) / 16, weights.sum(-2))


def test_the_flash_kernel_aligns_causal_attention_at_the_end():
    """Of fewer queries than keys: the last query sees the last key, and the first one all before it."""
    torch.manual_seed(0)
    lengths = 5, 8, 8
    q, k, v = (torch.randn(2, 4, n, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True) for n in lengths)
    out = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)[0]
    found = (out, *torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    q, k, v = (each.detach().double().cpu().requires_grad_() for each in (q, k, v))
    seen = torch.ones(5, 8, dtype=torch.bool).tril(3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    wanted = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=0.02, atol=0.02)


def test_sizes_that_depend_on_numbers_are_true():
    mask = torch.tensor([0, 1, 1, 0, 1], device="cuda")
    assert mask.nonzero().flatten().tolist() == [1, 2, 4]
    assert mask[mask > 0].tolist() == [1, 1, 1]
    assert torch.unique(mask).tolist() == [0, 1]


def test_fp16_with_a_scaler_skips_a_step_that_overflows():
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler(init_scale=4.0)
    for gradient in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.0] * 4
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.pow(10000.0, x),  # of rotary embeddings
        lambda x: 2 ** x.long(),
        lambda x: torch.isin(2, x),
        lambda x: torch.searchsorted(x, 1.5),
        lambda x: torch.pow(2.0, x, out=torch.empty(4, device=x.device)),
        lambda x: x + torch.linspace(-1, 1, 4, device=x.device),
        lambda x: torch.remainder(5, x + 1),
        lambda x: torch.floor_divide(x, 2),
    ],
    ids=[
        "pow",
        "pow of integers",
        "isin",
        "searchsorted",
        "pow into a tensor",
        "numbers alone",
        "remainder",
        "a number behind",
    ],
)
def test_a_number_is_an_operand_as_on_the_cpu(call):
    true = call(torch.arange(4.0))
    with torch.device("cuda"):
        found = call(torch.arange(4.0))
    assert found.dtype == true.dtype
    assert torch.equal(found.cpu(), true)


def test_an_operator_without_a_reference_is_refused_by_its_name():
    with pytest.raises(NotComputed, match="aten::_fill_mem_eff_dropout_mask_ has no kernel on the CPU"):
        torch.ops.aten._fill_mem_eff_dropout_mask_(torch.zeros(1, 1, 4, 4, device="cuda"), 0.5, 1, 0)


def test_a_product_in_a_wider_dtype_is_written_where_it_is_told():
    torch.manual_seed(0)
    a, b = (torch.randn(8, 8, dtype=torch.bfloat16) for _ in range(2))
    there = torch.full((8, 8), -1.0, device="cuda")
    torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32, out=there)
    torch.testing.assert_close(there.cpu(), a.float() @ b.float())


def test_the_logarithm_of_a_sigmoid_keeps_nothing_and_has_the_cpus_gradient():
    torch.manual_seed(0)
    there = torch.randn(8, device="cuda", requires_grad=True)
    here = there.detach().cpu().requires_grad_()
    for x in (here, there):
        F.logsigmoid(x).square().sum().backward()
    assert torch.equal(here.grad, there.grad.cpu())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_four_bits_are_read_as_on_the_cpu(dtype):
    """In a process of its own: bitsandbytes is there before the values are."""
    code = (
        "import torch, bitsandbytes.functional as f; from tightfit.devices.nullcard.values import true_values\n"
        f"w, x = torch.randn(64, 64, dtype={dtype}), torch.randn(2, 64, dtype={dtype})\n"
        "packed, state = f.quantize_4bit(w, quant_type='nf4'); here = f.dequantize_4bit(packed, state)\n"
        "with true_values():\n"
        "    packed, state = f.quantize_4bit(w.cuda(), quant_type='nf4'); into = torch.empty_like(w, device='cuda')\n"
        "    there = f.dequantize_4bit(packed, state); f.dequantize_4bit(packed, state, out=into)\n"
        "    print(torch.equal(here, there.cpu()), torch.equal(here, into.cpu()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "True True\n", found.stderr


SETTINGS = ({}, {"bidirectional": True, "batch_first": True}, {"bias": False})


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # oneDNN has none
@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, settings) for kind in (nn.LSTM, nn.GRU, nn.RNN) for settings in SETTINGS), (nn.LSTM, {"proj_size": 4})],
)
def test_recurrent_networks_compute_what_the_cpu_does(kind, settings):
    torch.manual_seed(0)
    here, x = kind(6, 8, 2, **settings), torch.randn(3, 5, 6)
    there = copy.deepcopy(here).cuda()
    found = []
    for network, given in ((here, x.clone().requires_grad_()), (there, x.cuda().requires_grad_())):
        out, states = network(given)
        (out.square().sum() + (states[0] if kind is nn.LSTM else states).sum()).backward()
        found.append([t.cpu() for t in (out, given.grad, *(weight.grad for weight in network.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
