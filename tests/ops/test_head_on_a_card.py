"""The loop of a loss head for cards: run on the CPU, at most the plain error; and its price on simulated cards."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import error_ratios, results
from test_linear_cross_entropy import sample, some_labels, with_labels

import tightfit
from tightfit.ops import _card_head, cross_entropy, head_loss, linear_cross_entropy
from tightfit.ops.cross_entropy import plain_linear_cross_entropy

SHAPES = [(64, 32, 500), (257, 48, 1001), (33, 129, 3000)]  # tokens, width, vocabulary; few and many tokens for a width


@pytest.fixture
def loops(monkeypatch):
    """The choice of the loop as on a card, in chunks of a few tokens, with products that a CPU has."""
    calls = []
    loop = _card_head.run_chunks_on_a_card

    def counted(*arguments):
        calls.append(arguments)
        return loop(*arguments)

    for module in (head_loss, cross_entropy):
        monkeypatch.setattr(module, "writes_wider", lambda operand, dtype=None: True)
    monkeypatch.setattr(head_loss, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(_card_head, "LEAST_ROWS", 16)
    monkeypatch.setattr(_card_head, "CHUNKS", 3)
    monkeypatch.setattr(head_loss, "run_chunks_on_a_card", counted)
    return calls


@pytest.mark.keeps("loop-loss-head-16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_error_is_at_most_that_of_the_plain_version(loops, dtype, reduction):
    squares = []
    for tokens, width, vocabulary in SHAPES:
        labels = some_labels(tokens, vocabulary)
        ours = with_labels(linear_cross_entropy, labels, reduction=reduction)
        plain = with_labels(plain_linear_cross_entropy, labels, reduction=reduction)
        samples = [sample(seed, tokens, width, vocabulary) for seed in range(4)]
        squares.append(error_ratios(ours, plain, samples, dtype))
    assert len(loops) == 4 * len(SHAPES)
    assert {_card_head.waits(tokens, torch.empty(1, width, dtype=torch.bfloat16)) for tokens, width, _ in SHAPES} == {
        True,
        False,
    }
    loss, of_hidden, of_weight = torch.tensor(squares).square().mean(dim=0).sqrt().tolist()
    assert max(loss, of_hidden, of_weight) <= 1, (loss, of_hidden, of_weight)


@pytest.mark.parametrize(("tokens", "ignored"), [(65, 0.0), (65, 0.5), (65, 1.0), (20, 0.3)])
@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=2)), ids=str)
def test_ignored_tokens_and_inputs_without_gradients(loops, tokens, ignored, needed):
    labels = some_labels(tokens, ignored=ignored)
    for width in (8, 48):
        made = []
        for loss in (linear_cross_entropy, plain_linear_cross_entropy):
            leaves = [
                t.bfloat16().requires_grad_(need) for t, need in zip(sample(0, tokens, width), needed, strict=True)
            ]
            out = loss(*leaves, labels)
            if any(needed):
                (3 * out).backward(retain_graph=True)
                (2 * out).backward()  # adds to what the first one made
            made.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for mine, plain in zip(*made, strict=True):
            assert (mine is None) == (plain is None)
            if mine is not None and ignored == 1:
                assert not mine.any(), "zero, where PyTorch has NaN"
            elif mine is not None:
                torch.testing.assert_close(mine.float(), plain.float(), rtol=3e-2, atol=2e-2 * plain.abs().max().item())
    assert bool(loops) == any(needed)


def test_under_autocast_the_gradients_of_fp32_weights_are_fp32(loops):
    labels, inputs = some_labels(), sample()

    def call(*leaves):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(*leaves, labels)

    made = results(call, inputs, torch.float32)
    assert loops
    truth = results(with_labels(plain_linear_cross_entropy, labels), inputs, torch.float64)
    for mine, wanted in zip(made, truth, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize(
    ("settings", "bias"), [({"z_loss": 1e-2}, False), ({"label_smoothing": 0.1}, False), ({}, True)], ids=str
)
def test_what_the_loop_does_not_compute_goes_the_general_way(loops, settings, bias):
    inputs = [t.bfloat16().requires_grad_() for t in sample(bias=bias)]
    with_labels(linear_cross_entropy, some_labels(), **settings)(*inputs).backward()
    assert not loops


def head_of(size, loss):
    """A step of a head alone, and its tensors without memory: tokens, width, vocabulary."""
    tokens, width, vocabulary = size
    hidden, weight = (
        torch.empty(rows, width, dtype=torch.bfloat16, device="meta").requires_grad_() for rows in (tokens, vocabulary)
    )
    return (lambda h, w, labels: loss(h, w, labels).backward()), hidden, weight, torch.zeros(tokens, dtype=torch.int64)


def plain(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).float(), labels)


@pytest.mark.keeps("loop-loss-head-16")
@pytest.mark.parametrize("device", ["rtx4090", "h200"])
@pytest.mark.parametrize(
    ("size", "share"),
    [((8192, 768, 50257), 0.08), ((16384, 2048, 128256), 0.06), ((2048, 4096, 128256), 0.3)],
    ids=["GPT-2 at 8 x 1024", "1B at 16k tokens", "8B at one sequence"],
)
def test_on_a_card_the_head_in_chunks_costs_no_time_and_little_memory(device, size, share):
    ours, theirs = (tightfit.trace(*head_of(size, loss), device=device) for loss in (linear_cross_entropy, plain))
    tokens, width, vocabulary = size
    held = 2 * 2 * width * (tokens + vocabulary)  # inputs and gradients
    # A hundredth: with an odd vocabulary a Hopper card spends all its time in products, which are as long in chunks.
    assert ours.step_seconds <= 1.01 * theirs.step_seconds
    assert ours.peak_bytes - held <= share * (theirs.peak_bytes - held)


@pytest.mark.parametrize(("card", "dtype", "can"), [
    ("t4", torch.bfloat16, False), ("v100-16", torch.bfloat16, False), ("t4", torch.float16, True),
    ("a100-40", torch.bfloat16, True),
])  # fmt: skip
def test_products_that_write_wider_are_left_to_cards_that_have_them(card, dtype, can, monkeypatch):
    """A T4's cuBLAS ends in an error for operands in bf16 and a result in fp32."""
    wide, mm = [], torch.mm

    def product(*operands, **named):
        wide.append("out_dtype" in named)
        return mm(*operands, **named)

    monkeypatch.setattr(torch, "mm", product)
    step, hidden, weight, labels = head_of((600, 64, 1000), linear_cross_entropy)
    tightfit.trace(step, hidden.to(dtype), weight.to(dtype), labels, device=card)
    assert any(wide) == can
    assert wide
