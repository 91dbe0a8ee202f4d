"""The distillation loss against stored tokens: dense for all tokens, unbiased for a sample, and in chunks."""

import itertools

import pytest
import torch
from fp64_truth import OperatorLog, error_ratios, results

import tightfit
from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import sampled_tokens, stored_distillation_loss, top_k_tokens
from tightfit.ops.distillation import plain_distillation_loss
from tightfit.ops.stored_distillation import plain_stored_distillation_loss
from tightfit.ops.stored_tokens import TokenWeights

IGNORED = -100
ROUNDING = 64  # bytes: numbers that Python wraps
TOKENS, WIDTH, VOCABULARY = 33, 8, 61
CHOICES = {"sampled": sampled_tokens, "topk": top_k_tokens}
choices = pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)


def sample(seed=0, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY):
    """The student's hidden, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    return [hidden, weight * (2 / width**0.5), bias]


def teacher(tokens=TOKENS, vocabulary=VOCABULARY, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, vocabulary, dtype=dtype, generator=generator) * 2


def some_labels(tokens=TOKENS, vocabulary=VOCABULARY, ignored=0.3):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return labels.masked_fill_(torch.rand(tokens, generator=generator) < ignored, IGNORED)


def against(stored, labels, loss=stored_distillation_loss, **options):
    """The loss as a function of the student's tensors alone."""

    def call(hidden, weight, bias):
        return loss(hidden, weight, stored.ids, stored.weights, labels, bias=bias, tail_weight=stored.tail, **options)

    return call


def dense(logits, labels, **options):
    """Forward KL from a teacher of these logits: its hidden states, and a head that is the identity."""

    def call(hidden, weight, bias):
        identity = torch.eye(logits.shape[1], dtype=logits.dtype)
        return plain_distillation_loss(hidden, weight, logits, identity, labels, bias=bias, **options)

    return call


@pytest.mark.keeps("distillation-loss-gradients-equal")
@choices
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_for_all_tokens_the_gradients_are_those_of_the_dense_loss(choose, reduction):
    labels = some_labels()
    for temperature, hard_weight in itertools.product((1.0, 2.5), (0.0, 0.4)):
        mix = {"temperature": temperature, "hard_weight": hard_weight, "reduction": reduction}
        stored = choose(teacher(), VOCABULARY, temperature=temperature)
        ours = results(against(stored, labels, chunk_size=5, **mix), sample(), torch.float64)
        truth = results(dense(teacher(), labels, **mix), sample(), torch.float64)
        for mine, theirs in zip(ours[1:], truth[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        # A sample leaves out the teacher's entropy, which the student does not change.
        assert torch.allclose(ours[0], truth[0]) == (stored.tail is not None)


@choices
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_for_some_tokens_loss_and_gradients_are_those_of_the_plain_version(choose, reduction):
    labels, mix = some_labels(), {"temperature": 2.5, "hard_weight": 0.4, "reduction": reduction}
    for k in (1, 7):
        stored = choose(teacher(), k, temperature=2.5)
        ours = results(against(stored, labels, chunk_size=5, **mix), sample(), torch.float64)
        plain = results(against(stored, labels, plain_stored_distillation_loss, **mix), sample(), torch.float64)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@choices
def test_the_gradient_is_that_of_finite_differences(choose):
    inputs = [tensor.double().requires_grad_() for tensor in sample(tokens=5, vocabulary=7)]
    stored = choose(teacher(5, 7), 3, temperature=1.5)
    loss = against(stored, some_labels(5, 7), temperature=1.5, hard_weight=0.3, chunk_size=2)
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


def test_the_tail_is_one_event():
    """Its formula, on distributions that really have k + 1 events."""
    (hidden, weight, bias), labels = sample(), some_labels(ignored=0)
    ids, weights, tail = stored = top_k_tokens(teacher(dtype=torch.float32), 7)
    q, p = (hidden @ weight.T + bias).softmax(1), teacher(dtype=torch.float32).softmax(1)
    torch.testing.assert_close(weights, p.sort(1, descending=True).values[:, :7])
    torch.testing.assert_close(tail, 1 - weights.sum(1))
    assert torch.equal(ids.long(), p.topk(7, 1).indices)
    of_ids = q.gather(1, ids.long())
    coarse_q, coarse_p = (torch.cat([some, 1 - some.sum(1, keepdim=True)], 1) for some in (of_ids, weights))
    expected = (coarse_p * (coarse_p / coarse_q).log()).sum(1).mean()
    found = against(stored, labels)(hidden, weight, bias)
    torch.testing.assert_close(found, expected)
    assert found < (p * (p / q).log()).sum(1).mean()  # never above KL of the whole distributions


def test_a_sample_has_different_tokens_and_the_probable_ones_have_their_probability():
    generator, p = torch.Generator().manual_seed(0), teacher().softmax(1)
    for k in (1, 7, VOCABULARY):
        ids, weights, tail = sampled_tokens(teacher(), k, generator)
        assert tail is None
        assert all(len(set(row)) == k for row in ids.tolist())
        of_ids = p.gather(1, ids.long())
        threshold = torch.where(weights > of_ids * (1 + 1e-12), weights, 0).amax(1, keepdim=True)
        torch.testing.assert_close(weights, torch.maximum(of_ids, threshold))


@pytest.mark.keeps("gradient-sampled-tokens-teacher")
def test_the_gradient_of_a_sample_is_unbiased_and_that_of_the_top_k_is_not():
    tokens, width, vocabulary, k, draws = 48, 16, 24, 6, 200
    logits, labels = teacher(tokens, vocabulary), some_labels(tokens, vocabulary)
    inputs = sample(3, tokens, width, vocabulary)

    def gradients(loss):
        return torch.cat([part.flatten() for part in results(loss, inputs, torch.float64)[1:]])

    def from_stored(stored):
        return gradients(against(stored, labels, temperature=1.5))

    truth = gradients(dense(logits, labels, temperature=1.5))
    counted = truth != 0  # ignored tokens have no gradient
    generators = [torch.Generator().manual_seed(seed) for seed in range(draws)]
    found = torch.stack([from_stored(sampled_tokens(logits, k, g, temperature=1.5)) for g in generators])
    standard_error = found.std(dim=0)[counted] / draws**0.5

    def z_scores(gradient):
        return (gradient - truth)[counted] / standard_error

    scores = z_scores(found.mean(dim=0))
    assert scores.abs().max() < 5
    assert 0.8 < scores.square().mean() < 1.2
    biased = z_scores(from_stored(top_k_tokens(logits, k, temperature=1.5)))
    assert biased.abs().max() > 5
    assert biased.square().mean() > 1.2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_at_most_that_of_the_plain_version(dtype):
    squares = []
    sizes = [(64, 32, 300), (129, 48, 601)]
    for draw, (tokens, width, vocabulary), choose in itertools.product(range(4), sizes, CHOICES.values()):
        torch.manual_seed(draw)  # for the sampled tokens
        labels, mix = some_labels(tokens, vocabulary), {"temperature": 1.5, "hard_weight": 0.3}
        stored = choose(teacher(tokens, vocabulary, torch.float32), 9, temperature=1.5)
        ours = against(stored, labels, chunk_size=50, **mix)
        plain = against(stored, labels, plain_stored_distillation_loss, **mix)
        squares.append(error_ratios(ours, plain, [sample(seed, tokens, width, vocabulary) for seed in range(4)], dtype))
    ratios = torch.tensor(squares).square().mean(dim=0).sqrt().tolist()
    # In bf16 the products are the same, so an error can come out the same to its last digits.
    assert max(ratios) <= (1 if dtype == torch.float32 else 1.001), ratios


@pytest.mark.parametrize("choose", [sampled_tokens, pytest.param(top_k_tokens, marks=pytest.mark.slow)])  # 2 s each
def test_forward_and_backward_need_a_chunk_of_logits_beside_the_gradients(choose):
    """As the allocator records it, and as the dry run predicts it."""
    tokens, width, vocabulary, rows, k = 256, 32, 1000, 32, 8
    student = [t.requires_grad_() for t in sample(0, tokens, width, vocabulary)]
    labels = some_labels(tokens, vocabulary, ignored=0)
    ids, weights, tail = stored = choose(teacher(tokens, vocabulary, torch.float32), k, temperature=2.0)
    loss = against(stored, labels, temperature=2.0, hard_weight=0.3, chunk_size=rows)

    def step():
        for leaf in student:
            leaf.grad = None
        loss(*student).backward()

    step()
    for leaf in student:
        leaf.grad = None
    predicted = tightfit.trace(step, device="cpu").peak_bytes
    resident = [*student, labels, ids, weights, *([] if tail is None else [tail])]
    measured = measured_peak(step, resident)
    assert abs(predicted - measured) <= ROUNDING
    gradients, chunk = sum(leaf.nbytes for leaf in student), rows * vocabulary * 4
    of_a_part, per_token = 3 * (rows // 8) * vocabulary * 4, 64 * tokens
    of_chunk = rows * (width * 4 + 6 * k * 8)
    assert measured - sum(t.nbytes for t in resident) <= gradients + chunk + of_a_part + of_chunk + per_token


@choices
def test_the_logits_of_all_tokens_never_exist_and_neither_does_a_copy_of_the_teachers(choose):
    inputs = [tensor.requires_grad_() for tensor in sample()]
    loss = against(choose(teacher(), 4), some_labels(), chunk_size=10, hard_weight=0.2)
    with OperatorLog() as log:
        loss(*inputs).backward()
    assert max(shape[0] for shape in log.shapes if shape[1:] == (VOCABULARY,)) == 10
    with OperatorLog() as log:
        choose(teacher(), 4)
    made = [shape[0] for shape in log.shapes[log.shapes.index((4, VOCABULARY)) :] if shape[1:] == (VOCABULARY,)]
    assert max(made) == 4


@choices
def test_what_is_stored_for_ignored_tokens_does_not_matter_and_without_a_label_nothing_is_learnt(choose):
    ids, weights, tail = choose(teacher(), 4)
    labels = some_labels()
    ignored = labels == IGNORED
    spoilt = TokenWeights(
        ids.masked_fill(ignored[:, None], 10**6),
        weights.masked_fill(ignored[:, None], torch.nan),
        None if tail is None else tail.masked_fill(ignored, torch.nan),
    )
    expected = results(against(TokenWeights(ids, weights, tail), labels), sample(), torch.float32)
    assert all(map(torch.equal, results(against(spoilt, labels), sample(), torch.float32), expected))
    for reduction in ("mean", "sum", "none"):
        nothing = results(
            against(spoilt, torch.full_like(labels, IGNORED), reduction=reduction), sample(), torch.float32
        )
        assert not any(tensor.any() for tensor in nothing)


def test_a_token_that_is_stored_twice_counts_twice():
    (ids, weights, _), labels = sampled_tokens(teacher(), 4), some_labels()
    twice = TokenWeights(ids.repeat(1, 2), weights.repeat(1, 2) / 2, None)
    once = results(against(TokenWeights(ids, weights, None), labels), sample(), torch.float64)
    for mine, theirs in zip(results(against(twice, labels), sample(), torch.float64), once, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_loss_is_infinite_where_the_student_gives_the_tail_nothing():
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[200.0], [0.0], [0.0]], requires_grad=True)
    stored = TokenWeights(torch.tensor([[0]]), torch.tensor([[0.5]]), torch.tensor([0.5]))
    found = results(against(stored, torch.zeros(1, dtype=torch.int64)), [hidden, weight, torch.zeros(3)], torch.float32)
    assert all(tensor.isfinite().all() for tensor in found)


def call(student, stored, labels, **options):
    hidden, weight, bias = student
    given = {"tail_weight": stored.tail, **options}
    return stored_distillation_loss(hidden, weight, stored.ids, stored.weights, labels, bias=bias, **given)


BAD = {
    "token id 61 is outside the student's vocabulary of 61: use a store": lambda s, t, y: call(
        s, t._replace(ids=t.ids.clamp(min=61)), y
    ),
    "token id -1 is outside": lambda s, t, y: call(s, t._replace(ids=-t.ids.clamp(max=1)), y),
    r"token_ids \(33, 3\), token_weights \(33, 4\)": lambda s, t, y: call(s, t._replace(ids=t.ids[:, 1:]), y),
    "token_ids are torch.float32": lambda s, t, y: call(s, t._replace(ids=t.ids.float()), y),
    "token_weights are torch.int64": lambda s, t, y: call(s, t._replace(weights=t.weights.long()), y),
    r"tail_weight \(32,\)": lambda s, t, y: call(s, t._replace(tail=t.tail[1:]), y),
    "temperature=-1 is not above 0": lambda s, t, y: call(s, t, y, temperature=-1),
    "k=0 is not between 1 and the vocabulary's 61 tokens": lambda s, t, y: top_k_tokens(teacher(), 0),
    "k=62 is not between": lambda s, t, y: sampled_tokens(teacher(), 62),
    r"logits \(61,\) of torch.float64: give": lambda s, t, y: sampled_tokens(teacher()[0], 2),
    "sampled_tokens: temperature=0 is": lambda s, t, y: sampled_tokens(teacher(), 2, temperature=0),
}


@pytest.mark.parametrize(("message", "wrong"), BAD.items(), ids=BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_line(message, wrong):
    with pytest.raises(InputError, match=message) as caught:
        wrong(sample(), top_k_tokens(teacher(), 4), some_labels())
    assert "\n" not in str(caught.value)
