"""Attention within a window: the plain one over a grid, at a cost that grows with window times sequence."""

import math

import pytest
import torch
from fp64_truth import OperatorLog, error_ratios, results
from torch.utils.flop_counter import FlopCounterMode

from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import attention
from tightfit.ops.attention import plain_attention

CHUNK = 16
LENGTH = 70  # a last chunk that is not whole


def sample(query_heads, key_heads, length=LENGTH, seed=0, width=8):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, length, width, generator=generator) for heads in (query_heads, key_heads, key_heads)]


def random(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


MASKS = {
    "no mask": lambda dtype: None,
    "padding": lambda dtype: random(2, 1, 1, LENGTH) > 0.3,
    "bias": lambda dtype: (random(1, 4, LENGTH, LENGTH) * 3).to(dtype),
    "bias that blinds": lambda dtype: torch.zeros(LENGTH, 1, dtype=dtype).index_fill(
        0, torch.tensor([3, 50]), -math.inf
    ),
}
DOCUMENTS = {
    "one document": None,
    "packed": torch.stack((torch.arange(LENGTH) // 30, torch.arange(LENGTH) // 11)),
    "interleaved": (torch.arange(LENGTH) % 3).expand(2, -1),
}


def limits(causal, window, mask, documents, dtype=torch.float64):
    return {"causal": causal, "window": window, "mask": MASKS[mask](dtype), "document_ids": DOCUMENTS[documents]}


@pytest.mark.keeps("attention-within-window-equals")
@pytest.mark.sampled(30)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("window", [1, CHUNK - 1, CHUNK, CHUNK + 1, 40])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_in_fp64_output_and_gradients_are_the_plain_ones(causal, window, mask, documents, key_heads):
    how = limits(causal, window, mask, documents)
    tensors = sample(4, key_heads)
    for chunk_size in (CHUNK, None):
        mine = results(lambda *t, size=chunk_size: attention(*t, **how, chunk_size=size), tensors, torch.float64)
        plain = results(lambda *t: plain_attention(*t, **how), tensors, torch.float64)
        for ours, theirs in zip(mine, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 1.2), (torch.bfloat16, 1.0)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_where_queries_see_few_keys_the_error_is_near_that_of_the_plain_version_or_below(causal, dtype, times):
    squares = []
    for window in (CHUNK - 1, CHUNK, 40):
        for documents in DOCUMENTS:
            how = limits(causal, window, "padding", documents)
            ours, plain = (
                lambda *t, f=f, how=how, more=more: f(*t, **how, **more)
                for f, more in ((attention, {"chunk_size": CHUNK}), (plain_attention, {}))
            )
            squares.append(error_ratios(ours, plain, [sample(4, 2, seed=seed) for seed in range(4)], dtype))
    assert torch.tensor(squares).square().mean(dim=0).sqrt().max() <= times


def extra_bytes(length, window, causal):
    q, k, v = (t.requires_grad_() for t in sample(4, 1, length))
    gradient = torch.ones_like(q)
    resident = [q, k, v, gradient]

    def step():
        return torch.autograd.grad(attention(q, k, v, causal=causal, window=window), (q, k, v), gradient)

    return measured_peak(step, resident) - sum(t.nbytes for t in resident)


@pytest.mark.keeps("attention-within-window-equals")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [True, False])
def test_memory_grows_with_the_sequence_and_hardly_with_the_window(causal):
    narrow = extra_bytes(1024, 32, causal)
    assert extra_bytes(2048, 32, causal) <= 2 * narrow
    assert extra_bytes(1024, 512, causal) <= 1.3 * narrow


@pytest.mark.keeps("attention-within-window-equals")
@pytest.mark.slow  # long sequences
@pytest.mark.parametrize("causal", [True, False])
def test_the_work_grows_with_window_times_sequence(causal):
    def pairs(length, window):
        """Scores that are computed, from the multiplications of the two products over them: 8 wide each."""
        with FlopCounterMode(display=False) as counter:
            attention(*sample(1, 1, length), causal=causal, window=window, chunk_size=CHUNK)
        return counter.get_total_flops() / (2 * 8 + 2 * 8) / 2  # two rows of a batch

    for length, window in ((1024, 64), (1536, 64), (1024, 128)):
        seen = length * (window if causal else 2 * window)
        assert 0.9 * seen <= pairs(length, window) <= seen + length * CHUNK


def test_a_window_over_everything_is_none_at_all():
    q, k, v = sample(4, 2)
    with OperatorLog() as log:
        output = attention(q, k, v, causal=True, window=LENGTH)
    assert torch.equal(output, attention(q, k, v, causal=True))
    assert "amax" not in log.names


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("window", [None, 10, 40])
@pytest.mark.parametrize("chunk_size", [CHUNK, None])
@pytest.mark.parametrize("first", [0, 1, 30, LENGTH - 1])
def test_queries_that_stand_behind_keys_of_a_cache_see_what_they_saw_in_the_whole(causal, window, chunk_size, first):
    q, k, v = (t.double() for t in sample(4, 2))
    how = {"causal": causal, "window": window}
    last = attention(q[:, :, first:], k, v, **how, offset=first, chunk_size=chunk_size)
    torch.testing.assert_close(last, plain_attention(q, k, v, **how)[:, :, first:])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"offset": -1}, "offset=-1 is negative"),
        ({"offset": 3, "document_ids": DOCUMENTS["packed"]}, "leave out offset"),
    ],
)
def test_an_offset_that_makes_no_sense_is_refused_in_one_line(how, message):
    with pytest.raises(InputError, match=message) as caught:
        attention(*sample(4, 2), **how)
    assert "\n" not in str(caught.value)
