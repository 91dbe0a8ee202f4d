"""Chunked linear + cross-entropy: the plain loss, at most the plain error, and never all logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import OperatorLog, error_ratios, results

from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import linear_cross_entropy
from tightfit.ops.cross_entropy import plain_linear_cross_entropy
from tightfit.ops.head_loss import default_chunk_size
from tightfit.runtime.internals import autograd

IGNORED = -100


def sample(seed=0, tokens=65, hidden=24, vocabulary=301, bias=False):
    """hidden, weight and, if asked for, bias: spread so that probabilities are neither flat nor certain."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, hidden), (vocabulary, hidden), *([(vocabulary,)] if bias else [])]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[1] *= 2 / hidden**0.5
    return tensors


def some_labels(tokens=65, vocabulary=301, ignored=0.2):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return labels.masked_fill_(torch.rand(tokens, generator=generator) < ignored, IGNORED)


def with_labels(loss, labels, **options):
    """The loss as a function of its floating inputs alone."""

    def call(hidden, weight, bias=None):
        return loss(hidden, weight, labels, bias=bias, **options)

    return call


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
    for reduction, smoothing, z_loss in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 1e-2))
]
options = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))


@pytest.mark.sampled(60)
@options
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 16, 64, 65, 1000, None])
def test_in_fp64_loss_and_gradients_are_the_plain_ones(options, bias, chunk_size):
    labels, inputs = some_labels(), sample(bias=bias)
    ours = with_labels(linear_cross_entropy, labels, chunk_size=chunk_size, **options)
    plain = with_labels(plain_linear_cross_entropy, labels, **options)
    for mine, theirs in zip(results(ours, inputs, torch.float64), results(plain, inputs, torch.float64), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.keeps("error-operators-against-fp64")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_error_is_at_most_that_of_the_plain_version(dtype, reduction):
    shapes = [(64, 32, 500), (257, 48, 1001), (33, 129, 3000)]
    squares = []
    for (tokens, hidden, vocabulary), smoothing, z_loss in itertools.product(shapes, (0.0, 0.1), (0.0, 1e-2)):
        labels = some_labels(tokens, vocabulary)
        terms = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss}
        ours = with_labels(linear_cross_entropy, labels, chunk_size=50, **terms)
        plain = with_labels(plain_linear_cross_entropy, labels, **terms)
        samples = [sample(seed, tokens, hidden, vocabulary, bias=True) for seed in range(4)]
        squares.append(error_ratios(ours, plain, samples, dtype))
    loss, of_hidden, of_weight, of_bias = torch.tensor(squares).square().mean(dim=0).sqrt().tolist()
    assert max(loss, of_hidden, of_weight, of_bias) <= 1, (loss, of_hidden, of_weight, of_bias)


def test_the_weight_gradient_of_bf16_inputs_is_summed_in_fp32():
    labels = torch.zeros(4096, dtype=torch.int64)
    hidden = torch.full((4096, 1), 1 / 256, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_size=1).backward()
    # 4096 terms of 1/512: a bf16 sum stops growing at 1/2, when a term is half a unit in the last place.
    assert weight.grad is not None
    assert weight.grad[1].item() == 8.0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_under_autocast_it_is_as_the_plain_version_is(reduction):
    labels, inputs = some_labels(), sample(bias=True)

    def autocasted(loss):
        def call(*leaves):
            with torch.autocast("cpu", torch.bfloat16):
                return with_labels(loss, labels, reduction=reduction)(*leaves)

        return call

    mine = results(autocasted(linear_cross_entropy), inputs, torch.float32)
    plain = results(autocasted(plain_linear_cross_entropy), inputs, torch.float32)
    assert [t.dtype for t in mine] == [t.dtype for t in plain] == [torch.float32] * 4
    for ours, theirs in zip(mine, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=1e-2 * theirs.abs().max().item())
    ratios = error_ratios(
        autocasted(linear_cross_entropy),
        lambda *leaves: (
            autocasted(plain_linear_cross_entropy)(*leaves)
            if leaves[0].dtype == torch.float32
            else with_labels(plain_linear_cross_entropy, labels, reduction=reduction)(*leaves)
        ),
        [sample(seed, bias=True) for seed in range(6)],
        torch.float32,
    )
    # The products are the same bf16 products, so an error can come out the same to its last digits.
    assert max(ratios) <= 1.001, ratios


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_logits_of_all_tokens_never_exist(reduction, recorded):
    labels, (hidden, weight) = some_labels(ignored=0), sample(hidden=8)
    hidden.requires_grad_(recorded)
    weight.requires_grad_(recorded)

    with OperatorLog() as log:
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_size=16)
        if recorded:
            loss.sum().backward()
    rows = [shape[0] for shape in log.shapes if shape[1:] == (301,)]
    assert max(rows) == 16


def test_forward_and_backward_need_one_chunk_of_logits_beside_the_gradients():
    tokens, width, vocabulary, rows = 512, 32, 2000, 64
    labels = some_labels(tokens, vocabulary, ignored=0)
    hidden, weight = (t.requires_grad_() for t in sample(0, tokens, width, vocabulary))
    resident = [hidden, weight, labels]

    def step():
        hidden.grad = weight.grad = None
        (linear_cross_entropy(hidden, weight, labels, chunk_size=rows) / 3).backward()

    peak = measured_peak(step, resident) - sum(t.nbytes for t in resident)
    gradients, chunk = hidden.nbytes + weight.nbytes, rows * vocabulary * 4
    per_token = 64 * tokens
    assert peak <= gradients + chunk + rows * width * 4 + per_token


def test_ignored_tokens_are_dropped_before_the_product():
    labels, (hidden, weight) = some_labels(ignored=0.5), sample()
    with OperatorLog() as log:
        linear_cross_entropy(hidden, weight, labels)
    rows = [shape[0] for shape in log.shapes if shape[1:] == (301,)]
    assert max(rows) == (labels != IGNORED).sum().item() < 65


def test_what_ignored_tokens_hold_does_not_matter():
    labels, (hidden, weight) = some_labels(), sample()
    spoilt = hidden.masked_fill((labels == IGNORED)[:, None], torch.nan).requires_grad_()
    loss = linear_cross_entropy(spoilt, weight, labels)
    loss.backward()
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, labels))
    assert spoilt.grad is not None
    assert not spoilt.grad[labels == IGNORED].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("tokens", [0, 9])
def test_without_a_label_that_counts_the_loss_and_its_gradients_are_zero(reduction, tokens):
    labels = torch.full((tokens,), IGNORED)
    hidden, weight, bias = (t.requires_grad_() for t in sample(tokens=tokens, bias=True))
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction)
    loss.sum().backward()
    assert not loss.any()
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_another_ignore_index_may_be_a_word_of_the_vocabulary():
    labels, inputs = some_labels(ignored=0), sample()
    labels[::3] = 7
    for mine, theirs in zip(
        results(with_labels(linear_cross_entropy, labels, ignore_index=7), inputs, torch.float64),
        results(with_labels(plain_linear_cross_entropy, labels, ignore_index=7), inputs, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_frozen_weight_gets_no_gradient_and_no_memory_for_one():
    labels, (hidden, weight) = some_labels(), sample()
    hidden.requires_grad_()
    with OperatorLog() as log:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert (301, 24) not in log.shapes
    assert hidden.grad is not None


def test_a_tied_weight_gets_both_gradients():
    labels, (_, weight) = some_labels(ignored=0), sample()
    weight.requires_grad_()

    def gradient(loss):
        return torch.autograd.grad(loss(F.embedding(labels, weight), weight, labels.roll(1)), weight)[0]

    torch.testing.assert_close(gradient(linear_cross_entropy), gradient(plain_linear_cross_entropy))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_retained_graph_gives_the_same_gradients_again(reduction):
    labels, (hidden, weight) = some_labels(), [t.requires_grad_() for t in sample()]
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum() * 3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    first = [t.clone() for t in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_the_private_question_gradients_are_copied_not_wrong(monkeypatch):
    monkeypatch.setattr(autograd, "_autograd", object())
    test_a_retained_graph_gives_the_same_gradients_again("mean")


def test_fp16_keeps_gradients_that_a_mean_would_make_vanish():
    tokens, vocabulary = 2048, 512
    labels = torch.zeros(tokens, dtype=torch.int64)
    weight = sample(0, tokens, 8, vocabulary)[1]
    hidden = torch.zeros(tokens, 8, requires_grad=True)
    scale = 2.0**16  # as a gradient scaler would have it

    def gradient(dtype):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = linear_cross_entropy(hidden, weight, labels)
        return torch.autograd.grad(loss * scale, hidden)[0]

    torch.testing.assert_close(gradient(torch.float16), gradient(torch.float32), rtol=1e-2, atol=1e-3)


def test_differentiating_twice_is_refused():
    labels, (hidden, weight) = some_labels(), [t.requires_grad_() for t in sample()]
    gradient = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden, create_graph=True)[0]
    with pytest.raises(InputError, match="linear_cross_entropy: cannot be differentiated twice"):
        gradient.sum().backward()


def test_the_default_chunk_follows_its_rule():
    assert default_chunk_size(1024, 512, 6400) == 2**20 // 6400  # 4 MiB
    assert default_chunk_size(16384, 512, 6400) == 16384 * 512 // 6400  # as large as the hidden states
    assert default_chunk_size(1024, 2048, 128256) == 2048 // 8  # an eighth of the hidden size
    assert default_chunk_size(10, 512, 6400) == 10
    assert default_chunk_size(0, 512, 6400) == 1


BAD = {
    r"hidden \(65, 24\), weight \(301, 23\)": lambda h, w, y: linear_cross_entropy(h, w[:, 1:], y),
    r"labels \(64,\) do not fit": lambda h, w, y: linear_cross_entropy(h, w, y[1:]),
    r"give hidden \(N, D\)": lambda h, w, y: linear_cross_entropy(h[None], w, y),
    r"bias \(24,\).*bias is \(V,\)": lambda h, w, y: linear_cross_entropy(h, w, y, bias=h[0]),
    r"label 301 is outside the vocabulary of 301": lambda h, w, y: linear_cross_entropy(h, w, y.clamp(min=301)),
    r"labels are torch.float32": lambda h, w, y: linear_cross_entropy(h, w, y.float()),
    r"hidden is torch.int64": lambda h, w, y: linear_cross_entropy(h.long(), w.long(), y),
    r"hidden is torch.float32, weight is torch.float64": lambda h, w, y: linear_cross_entropy(h, w.double(), y),
    r"reduction='avg' is unknown": lambda h, w, y: linear_cross_entropy(h, w, y, reduction="avg"),
    r"label_smoothing=2 is not": lambda h, w, y: linear_cross_entropy(h, w, y, label_smoothing=2),
    r"chunk_size=0 is less than 1": lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=0),
}


@pytest.mark.parametrize(("message", "call"), BAD.items(), ids=BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_line(message, call):
    with pytest.raises(InputError, match=message) as caught:
        call(*sample(), some_labels())
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # dynamo takes seconds to load
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks it of what it is given
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_compiled_code_the_loss_runs_as_it_is_written(reduction, backend):
    inputs, labels = [tensor.requires_grad_() for tensor in sample()], some_labels()

    def step(hidden, weight):
        return linear_cross_entropy(hidden * 2, weight, labels, reduction=reduction, chunk_size=16).sum() + 1

    plain = torch.autograd.grad(step(*inputs), inputs)
    made = torch.autograd.grad(torch.compile(step, backend=backend)(*inputs), inputs)
    assert all(map(torch.equal, made, plain))
