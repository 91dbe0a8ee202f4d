"""Attention in chunks: the plain attention, at most about the plain error, in memory linear in the sequence."""

import itertools
import math

import pytest
import torch
from fp64_truth import OperatorLog, error_ratios, results

from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import attention
from tightfit.ops.attention import plain_attention

# batch, query heads, key heads, queries, keys, head width
SHAPES = [(2, 4, 2, 67, 67, 16), (1, 6, 1, 33, 130, 8), (2, 2, 2, 129, 129, 32), (1, 4, 4, 101, 40, 24)]


def sample(shape, seed=0):
    batch, query_heads, key_heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = [(query_heads, queries), (key_heads, keys), (key_heads, keys)]
    return [torch.randn(batch, heads, length, width, generator=generator) for heads, length in sizes]


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def blinding(shape):
    """An additive mask under which some queries see nothing."""
    queries, keys = shape[3:5]
    hidden = random(queries, keys) > 0.7
    hidden[5:9] = True
    return random(1, keys).expand(queries, keys).masked_fill(hidden, -math.inf)


LIMITS = {
    "none": lambda s: {},
    "scale": lambda s: {"scale": 0.3},
    "causal": lambda s: {"causal": True},
    "padding": lambda s: {"mask": random(s[0], 1, 1, s[4]) > 0.3},
    "padding and causal": lambda s: {"mask": random(s[0], 1, 1, s[4]) > 0.3, "causal": True},
    "boolean mask of each head": lambda s: {"mask": random(*s[:2], *s[3:5]) > 0.6},
    "boolean mask of two dimensions": lambda s: {"mask": random(*s[3:5]) > 0.6},
    "float mask of each head": lambda s: {"mask": random(*s[:2], *s[3:5]) * 3},
    "float mask of a column": lambda s: {"mask": random(s[1], s[3], 1) * 3},
    "blind queries": lambda s: {"mask": blinding(s)},
    "window": lambda s: {"window": 9},
    "causal window": lambda s: {"window": 9, "causal": True},
    "window of one": lambda s: {"window": 1, "causal": True},
    "window wider than all": lambda s: {"window": 1000},
    "documents": lambda s: {"document_ids": (torch.arange(s[3]) // 23).expand(s[0], -1), "causal": True},
    "documents, window, padding": lambda s: {
        "document_ids": (torch.arange(s[3]) % 5).expand(s[0], -1),
        "window": 30,
        "mask": random(s[0], 1, 1, s[4]) > 0.3,
    },
}


def is_defined(limit, shape):
    """Documents are for self-attention: as many queries as keys."""
    return "documents" not in limit or shape[3] == shape[4]


def bound(operator, how):
    """`operator` under its limits, a float mask in the dtype of the inputs."""

    def call(q, k, v):
        mask = how.get("mask")
        cast = {} if mask is None or mask.dtype == torch.bool else {"mask": mask.to(q.dtype)}
        return operator(q, k, v, **{**how, **cast})

    return call


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("limit", "shape"), [(limit, shape) for limit in LIMITS for shape in SHAPES if is_defined(limit, shape)], ids=str
)
@pytest.mark.parametrize("chunk_size", [7, 32, 1000, None])
def test_in_fp64_output_and_gradients_are_the_plain_ones(shape, limit, chunk_size):
    how = LIMITS[limit](shape)
    ours = bound(attention, {**how, "chunk_size": chunk_size})
    for mine, plain in zip(
        results(ours, sample(shape), torch.float64),
        results(bound(plain_attention, how), sample(shape), torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)


def pooled_ratios(names, dtype):
    squares = []
    for shape, name in itertools.product(SHAPES, names):
        if not is_defined(name, shape):
            continue
        how = LIMITS[name](shape)
        ours, plain = bound(attention, {**how, "chunk_size": 32}), bound(plain_attention, how)
        squares.append(error_ratios(ours, plain, [sample(shape, seed) for seed in range(3)], dtype))
    return torch.tensor(squares).square().mean(dim=0).sqrt().tolist()


MANY_KEYS = ["none", "scale", "padding", "float mask of each head", "float mask of a column", "window wider than all"]


@pytest.mark.keeps("error-operators-against-fp64")
def test_in_fp32_the_error_is_at_most_that_of_the_plain_version():
    assert max(pooled_ratios(MANY_KEYS, torch.float32)) <= 1


def test_in_fp32_where_queries_see_few_keys_the_error_is_near_that_of_the_plain_version():
    """There sum(do * o) and the sum of p dp that it stands for differ in rounding, and little averages it out."""
    few = [name for name in LIMITS if name not in (*MANY_KEYS, "window of one")]
    out, of_q, of_k, of_v = pooled_ratios(few, torch.float32)
    assert max(out, of_v) <= 1
    assert max(of_q, of_k) <= 1.2


def test_in_bf16_the_error_is_at_most_that_of_the_plain_version():
    assert max(pooled_ratios([name for name in LIMITS if name != "window of one"], torch.bfloat16)) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [16, None])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(dtype, chunk_size, boolean):
    shape = (2, 4, 2, 33, 33, 16)
    mask = blinding(shape).to(dtype)
    mask = mask > -math.inf if boolean else mask
    q, k, v = (t.to(dtype).requires_grad_() for t in sample(shape))
    output = attention(q, k, v, mask=mask, chunk_size=chunk_size)
    of_q, of_k, of_v = torch.autograd.grad(output.float().square().sum(), (q, k, v))
    assert not output[:, :, 5:9].any()
    assert not of_q[:, :, 5:9].any()
    assert all(t.isfinite().all() for t in (output, of_q, of_k, of_v))


@pytest.mark.parametrize("size", [(2, 4, 33, 40), (1, 4, 33, 40), (33, 40), (4, 1, 40), (2, 1, 1, 40)])
def test_a_float_mask_gets_its_gradient(size):
    shape = (2, 4, 2, 33, 40, 8)
    tensors = sample(shape)
    mask = random(*size).double().requires_grad_()

    def gradient(operator, **how):
        output = operator(*(t.double() for t in tensors), mask=mask, **how)
        return torch.autograd.grad(output.square().sum(), mask)[0]

    torch.testing.assert_close(gradient(attention, chunk_size=8), gradient(plain_attention))


def test_the_head_width_of_values_may_be_another():
    q, k, v = sample((1, 4, 2, 20, 20, 8))
    v = torch.cat((v, v), dim=-1)
    for mine, plain in zip(
        results(lambda *t: attention(*t, causal=True, chunk_size=6), (q, k, v), torch.float64),
        results(lambda *t: plain_attention(*t, causal=True), (q, k, v), torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(mine, plain)


def test_heads_may_lie_in_memory_as_a_projection_leaves_them():
    shape = (2, 4, 2, 67, 67, 16)
    straight = results(lambda *t: attention(*t, causal=True, chunk_size=16), sample(shape), torch.float32)
    crossed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in sample(shape)]
    for one, other in zip(
        straight, results(lambda *t: attention(*t, causal=True, chunk_size=16), crossed, torch.float32), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", [{"causal": True}, {"window": 20}, {"documents": True}, {"padding": True}], ids=str)
def test_no_tensor_is_as_large_as_all_pairs_of_positions(how):
    shape = (1, 2, 1, 256, 256, 8)
    options = {"causal": True, "window": 20} & how.keys()
    limits = {name: how[name] for name in options}
    if "documents" in how:
        limits["document_ids"] = torch.arange(256)[None] // 50
    if "padding" in how:
        limits["mask"] = random(1, 1, 1, 256) > 0.3
    q, k, v = (t.requires_grad_() for t in sample(shape))
    with OperatorLog() as log:
        attention(q, k, v, chunk_size=16, **limits).sum().backward()
    assert max(math.prod(shape) for shape in log.shapes) == q.numel() < 256 * 256


def test_memory_grows_with_the_sequence_and_keys_are_not_repeated():
    def extra(length):
        q, k, v = (t.requires_grad_() for t in sample((1, 8, 1, length, length, 16)))
        gradient = torch.ones_like(q)
        resident = [q, k, v, gradient]

        def step():
            return torch.autograd.grad(attention(q, k, v, causal=True, chunk_size=32), (q, k, v), gradient)

        return measured_peak(step, resident) - sum(t.nbytes for t in resident)

    short, long = extra(256), extra(512)
    assert long <= 2 * short
    # output and gradient of q, gradients of k and v with one head, two numbers a row, tiles of 32 x 32 of 8 heads
    per_position, tiles = 4 * (2 * 8 * 16 + 2 * 16 + 2 * 8), 4 * 8 * (3 * 32 * 32 + 8 * 32 * 16)
    assert long <= 512 * per_position + tiles


def test_saved_are_the_inputs_the_output_and_two_numbers_a_query():
    q, k, v = (t.requires_grad_() for t in sample((2, 4, 2, 67, 67, 16)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = attention(q, k, v, causal=True, chunk_size=16)
    assert sorted(t.numel() for t in saved) == sorted(t.numel() for t in (q, k, v, output, q[..., :2]))


@pytest.mark.parametrize(("how", "tiles"), [({}, 16), ({"causal": True}, 10), ({"causal": True, "window": 16}, 7)])
def test_tiles_that_hold_nothing_to_see_are_skipped(how, tiles):
    q, k, v = sample((1, 1, 1, 64, 64, 8))
    how = {"mask": torch.ones(64, 64, dtype=torch.bool), **how}
    assert tiles_run(q, k, v, **how) == tiles


def tiles_run(q, k, v, **how):
    with OperatorLog() as log:
        attention(q, k, v, chunk_size=16, **how)
    return log.names.count("amax")  # each tile moves the running maximum once


def test_the_cost_of_a_window_grows_with_the_window():
    tensors = sample((1, 1, 1, 512, 512, 8))
    chunks = 512 // 16
    assert tiles_run(*tensors, causal=True) == chunks * (chunks + 1) // 2
    assert tiles_run(*tensors, causal=True, window=17) == 2 * chunks - 1
    assert tiles_run(*tensors, causal=True, window=33) == 3 * chunks - 3


def test_a_document_does_not_see_its_neighbours():
    q, k, v = sample((1, 2, 2, 40, 40, 8))
    ids = (torch.arange(40) // 20)[None]
    before = attention(q, k, v, causal=True, document_ids=ids)
    k[:, :, :20], v[:, :, :20] = 7.0, -7.0
    assert torch.equal(before[:, :, 20:], attention(q, k, v, causal=True, document_ids=ids)[:, :, 20:])


def test_without_a_chunk_size_torch_serves_where_it_can():
    q, k, v = sample((2, 4, 2, 33, 33, 8))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, causal=True), wanted)


@pytest.mark.parametrize("chunk_size", [16, None])
def test_under_autocast_it_computes_what_torch_would(chunk_size):
    q, k, v = (t.requires_grad_() for t in sample((2, 4, 2, 33, 33, 8)))
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(q, k, v, causal=True, chunk_size=chunk_size)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), plain_attention(q, k, v, causal=True), rtol=2e-2, atol=2e-2)


def test_frozen_inputs_get_no_gradient():
    q, k, v = sample((1, 2, 1, 20, 20, 8))
    k.requires_grad_()
    attention(q, k, v, chunk_size=8).sum().backward()
    assert k.grad is not None
    assert q.grad is None


def test_differentiating_twice_is_refused():
    q, k, v = (t.requires_grad_() for t in sample((1, 2, 1, 20, 20, 8)))
    (gradient,) = torch.autograd.grad(attention(q, k, v, chunk_size=8).sum(), q, create_graph=True)
    with pytest.raises(InputError, match="attention: cannot be differentiated twice"):
        gradient.sum().backward()


BAD = {
    r"not all of four dimensions": lambda q, k, v: attention(q[0], k, v),
    r"q \(1, 4, 9, 8\), k \(1, 2, 9, 7\).* do not fit": lambda q, k, v: attention(q, k[..., 1:], v),
    r"3 query heads are no multiple of 2 key heads": lambda q, k, v: attention(q[:, :3], k, v),
    r"k torch.float64": lambda q, k, v: attention(q, k.double(), v),
    r"window=0 is less than 1": lambda q, k, v: attention(q, k, v, window=0),
    r"chunk_size=-1 is less than 1": lambda q, k, v: attention(q, k, v, chunk_size=-1),
    r"mask \(8, 9\) cannot be broadcast": lambda q, k, v: attention(q, k, v, mask=torch.ones(8, 9)),
    r"mask is torch.int64": lambda q, k, v: attention(q, k, v, mask=torch.ones(9, 9, dtype=torch.int64)),
    r"document_ids \(9,\)": lambda q, k, v: attention(q, k, v, document_ids=torch.arange(9)),
}


@pytest.mark.parametrize(("message", "call"), BAD.items(), ids=BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_line(message, call):
    with pytest.raises(InputError, match=message) as caught:
        call(*sample((1, 4, 2, 9, 9, 8)))
    assert "\n" not in str(caught.value)
