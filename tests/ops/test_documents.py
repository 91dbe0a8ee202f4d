"""Documents of packed rows on a CPU: nothing is computed between them, and each one's numbers are its own."""

import sys

import pytest
import torch

from tightfit.errors import InputError
from tightfit.ops import attention
from tightfit.ops._documents import _FORWARD, earliest_keys, runs
from tightfit.ops.attention import plain_attention

LENGTHS = [[5, 1, 20, 6], [32], [1, 31]]


def ids_of(rows=LENGTHS):
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])


def tensors(heads=4, groups=2, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = [(3, heads, 32, 16), (3, heads // groups, 32, 16), (3, heads // groups, 32, 16)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def results(function, inputs, **how):
    out = function(*inputs, causal=True, document_ids=ids_of(), **how)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def fused_with_a_mask(q, k, v, *, causal, document_ids, scale=None):
    """PyTorch's own attention, told by a mask what is seen."""
    seen = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril() if causal else None
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


def error(found, truth):
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, truth, strict=True)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("how", [{}, {"scale": 0.3}], ids=str)
def test_output_and_gradients_are_as_near_to_fp64_as_those_of_the_same_kernel_with_a_mask(groups, how):
    inputs = tensors(groups=groups)
    truth = results(plain_attention, [each.detach().double().requires_grad_() for each in inputs], **how)
    found, masked = results(attention, inputs, **how), results(fused_with_a_mask, inputs, **how)
    assert error(found, truth) <= 1.2 * error(masked, truth)


def test_a_document_alone_has_the_same_bits():
    q, k, v = tensors()
    packed = attention(q, k, v, causal=True, document_ids=ids_of())
    alone = attention(q[:1, :, 6:26], k[:1, :, 6:26], v[:1, :, 6:26], causal=True)
    assert torch.equal(packed[:1, :, 6:26], alone)


def test_the_kernel_runs_once_for_each_document(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tightfit.ops._documents._FORWARD", lambda *a, **how: seen.append(a[0].shape[2]) or _FORWARD(*a, **how)
    )
    attention(*tensors(), causal=True, document_ids=ids_of())
    assert seen == [length for row in LENGTHS for length in row]


def test_ids_that_come_back_are_no_runs_and_are_served_all_the_same():
    ids = (torch.arange(32) % 3).expand(3, -1)
    assert runs(ids) is None
    assert earliest_keys(ids) is None
    q, k, v = tensors()
    found = attention(q, k, v, causal=True, document_ids=ids)
    assert torch.allclose(found, plain_attention(q, k, v, causal=True, document_ids=ids), atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"window": 20}], ids=str)
def test_leaving_out_tiles_of_other_documents_changes_no_bit(how, monkeypatch):
    inputs, how = tensors(), {**how, "chunk_size": 4}
    products, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: products.append(1) or matmul(a, b))
    rows = [[6, 20, 6], [7, 25], [8, 18, 6]]
    found = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(sys.modules["tightfit.ops.attention"], "earliest_keys", lambda ids: None)
        products.clear()
        out = attention(*inputs, causal=True, document_ids=ids_of(rows), **how)
        found.append(([out, *torch.autograd.grad(out.square().sum(), inputs)], len(products)))
    (left_out, fewer), (whole, more) = found
    assert fewer < more
    for one, other in zip(left_out, whole, strict=True):
        assert torch.equal(one, other)


def test_a_document_cannot_be_differentiated_twice_and_says_so():
    q, k, v = tensors()
    out = attention(q, k, v, causal=True, document_ids=ids_of())
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(InputError, match="attention: cannot be differentiated twice"):
        gradient.sum().backward()
