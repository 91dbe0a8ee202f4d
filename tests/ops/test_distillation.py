"""The distillation loss of two heads: the dense loss, at most its error, and never the logits of all tokens."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from fp64_truth import OperatorLog, error_ratios, results

import tightfit
from tightfit.errors import InputError
from tightfit.memory.allocator import measured_peak
from tightfit.ops import distillation_loss, hidden_state_loss
from tightfit.ops.distillation import plain_distillation_loss, plain_hidden_state_loss

IGNORED = -100
ROUNDING = 64  # bytes: numbers that Python wraps
TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 33, 8, 12, 61
DIVERGENCES = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "jsd", "beta": 0.3},
    {"divergence": "logits_mse"},
]
divergences = pytest.mark.parametrize("options", DIVERGENCES, ids=lambda options: options["divergence"])


def sample(seed=0, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY):
    """The student's hidden, weight and bias: probabilities are neither flat nor certain."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((tokens, width), (vocabulary, width), (vocabulary,))
    )
    return [hidden, weight * (2 / width**0.5), bias]


def teacher(dtype=torch.float32, tokens=TOKENS, vocabulary=VOCABULARY):
    return [tensor.to(dtype) for tensor in sample(9, tokens, TEACHER_WIDTH, vocabulary)]


def some_labels(tokens=TOKENS, vocabulary=VOCABULARY, ignored=0.3):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return labels.masked_fill_(torch.rand(tokens, generator=generator) < ignored, IGNORED)


def against(teacher, labels, loss=distillation_loss, **options):
    """The loss as a function of the student's tensors alone."""
    teacher_hidden, teacher_weight, teacher_bias = teacher

    def call(hidden, weight, bias):
        dense = loss is plain_distillation_loss and hidden.dtype == torch.float64
        of_teacher = [t.double() if dense else t for t in (teacher_hidden, teacher_weight, teacher_bias)]
        return loss(hidden, weight, *of_teacher[:2], labels, bias=bias, teacher_bias=of_teacher[2], **options)

    return call


@pytest.mark.keeps("distillation-loss-gradients-equal")
@divergences
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_in_fp64_loss_and_gradients_are_those_of_the_dense_loss(options, reduction):
    given = teacher(torch.float64), some_labels()
    for temperature, hard_weight, chunk_size in itertools.product((1.0, 2.5), (0.0, 0.4), (5, None)):
        mix = {**options, "temperature": temperature, "hard_weight": hard_weight, "reduction": reduction}
        ours = results(against(*given, chunk_size=chunk_size, **mix), sample(), torch.float64)
        dense = results(against(*given, loss=plain_distillation_loss, **mix), sample(), torch.float64)
        for mine, theirs in zip(ours, dense, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@divergences
def test_the_gradient_is_that_of_finite_differences(options):
    hidden, weight, bias = (t.double().requires_grad_() for t in sample(tokens=5, vocabulary=7))
    given = teacher(torch.float64, 5, 7), some_labels(5, 7)
    loss = against(*given, temperature=1.5, hard_weight=0.3, chunk_size=2, **options)
    assert torch.autograd.gradcheck(loss, (hidden, weight, bias), fast_mode=True)


def test_the_formulas_are_those_of_the_papers():
    """Written out once more, token by token: the dense version above is ours too."""
    (hidden, weight, bias), (states, of_teacher, teacher_bias) = sample(), teacher()
    labels, temperature = some_labels(ignored=0), 2.0
    student, expected = hidden @ weight.T + bias, states @ of_teacher.T + teacher_bias
    q, p = (student / temperature).softmax(1), (expected / temperature).softmax(1)
    m = 0.3 * p + 0.7 * q
    forward, reverse = (p * (p / q).log()).sum(1), (q * (q / p).log()).sum(1)
    jsd = 0.3 * (p * (p / m).log()).sum(1) + 0.7 * (q * (q / m).log()).sum(1)
    hard = -student.softmax(1).gather(1, labels[:, None]).log().squeeze(1)
    values = [4 * forward, 4 * reverse, 4 * jsd, (student - expected).square().mean(1)]
    for options, soft in zip(DIVERGENCES, values, strict=True):
        found = against(teacher(), labels, temperature=temperature, hard_weight=0.25, **options)(hidden, weight, bias)
        torch.testing.assert_close(found, (0.75 * soft + 0.25 * hard).mean())


def test_at_the_ends_of_beta_jsd_is_a_kl_divergence():
    given, inputs = (teacher(), some_labels()), sample()
    for beta, name in ((0, "forward_kl"), (1, "reverse_kl")):
        jsd = against(*given, divergence="jsd", beta=beta)(*inputs)
        assert torch.equal(jsd, against(*given, divergence=name)(*inputs))


@pytest.mark.slow  # 17 s for the import of trl
def test_beta_is_that_of_trl():
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    (hidden, weight, _), (states, of_teacher, _) = sample(), teacher()
    labels = some_labels()
    for beta in (0.0, 0.3, 1.0):
        theirs = gkd.GKDTrainer.generalized_jsd_loss(
            (hidden @ weight.T)[None], (states @ of_teacher.T)[None], labels[None], beta=beta, temperature=2.0
        )
        ours = distillation_loss(
            hidden, weight, states, of_teacher, labels, divergence="jsd", beta=beta, temperature=2.0
        )
        torch.testing.assert_close(ours, 4 * theirs)


@pytest.mark.keeps("distillation-loss-gradients-equal")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_error_is_at_most_that_of_the_plain_version(dtype):
    shapes, mixes, squares = [(64, 32, 300), (129, 48, 601)], [(1.0, 0.0), (1.5, 0.3)], []
    for (tokens, width, vocabulary), (temperature, hard_weight), options in itertools.product(
        shapes, mixes, DIVERGENCES
    ):
        given = teacher(dtype, tokens, vocabulary), some_labels(tokens, vocabulary)
        mix = {**options, "temperature": temperature, "hard_weight": hard_weight}
        ours = against(*given, chunk_size=50, **mix)
        plain = against(*given, loss=plain_distillation_loss, **mix)
        samples = [sample(seed, tokens, width, vocabulary) for seed in range(3)]
        squares.append(error_ratios(ours, plain, samples, dtype))
    ratios = torch.tensor(squares).square().mean(dim=0).sqrt().tolist()
    # In bf16 the products are the same, so an error can come out the same to its last digits.
    assert max(ratios) <= (1 if dtype == torch.float32 else 1.001), ratios


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_autocast_it_is_the_plain_version_within_the_rounding_of_its_products(reduction):
    given, options = (teacher(), some_labels()), {"temperature": 2.0, "hard_weight": 0.3, "reduction": reduction}

    def autocasted(loss):
        def call(*student):
            with torch.autocast("cpu", torch.bfloat16):
                return against(*given, loss=loss, **options)(*student)

        return call

    ours = results(autocasted(distillation_loss), sample(), torch.float32)
    plain = results(autocasted(plain_distillation_loss), sample(), torch.float32)
    exact = results(against(*given, loss=plain_distillation_loss, **options), sample(), torch.float32)
    for mine, theirs, truth in zip(ours, plain, exact, strict=True):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, truth)  # the products are really in bf16
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=1e-2 * theirs.abs().max().item())


def test_a_teacher_of_another_width_and_dtype_serves_and_gets_no_gradient():
    labels, of_teacher = some_labels(), teacher(torch.bfloat16)
    for student, teachers in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        inputs = [t.to(student).requires_grad_() for t in sample()]
        states = [t.to(teachers).detach().requires_grad_() for t in of_teacher]
        against(states, labels, chunk_size=16)(*inputs).backward()
        rounded = [t.detach().to(student).double() for t in sample()]
        exact = results(against(of_teacher, labels, loss=plain_distillation_loss), rounded, torch.float64)
        for leaf, truth in zip(inputs, exact[1:], strict=True):
            assert leaf.grad is not None
            assert leaf.grad.dtype == student
            torch.testing.assert_close(leaf.grad.double(), truth, rtol=0.1, atol=0.02 * truth.abs().max().item())
        assert all(leaf.grad is None for leaf in states)


@pytest.mark.keeps("distillation-loss-gradients-equal")
@pytest.mark.parametrize("recorded", [True, False])
def test_the_logits_of_all_tokens_never_exist(recorded):
    inputs = [tensor.requires_grad_(recorded) for tensor in sample()]
    for options, reduction in zip(DIVERGENCES, ("mean", "none", "sum", "none"), strict=True):
        loss = against(teacher(), some_labels(), chunk_size=16, hard_weight=0.2, reduction=reduction, **options)
        with OperatorLog() as log:
            total = loss(*inputs).sum()
            if recorded:
                total.backward()
        assert max(shape[0] for shape in log.shapes if shape[1:] == (VOCABULARY,)) == 16


@pytest.mark.keeps("distillation-loss-gradients-equal")
@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=[pytest.mark.slow] * (o["divergence"] != "jsd"), id=o["divergence"]) for o in DIVERGENCES],
)  # 2 s each; JSD has the most tensors beside the logits
def test_forward_and_backward_need_a_chunk_of_both_logits_beside_the_gradients(options):
    """As the allocator records it, and as the dry run predicts it."""
    tokens, width, vocabulary, rows = 256, 32, 1000, 32
    student = [t.requires_grad_() for t in sample(0, tokens, width, vocabulary)]
    given, labels = teacher(torch.float32, tokens, vocabulary), some_labels(tokens, vocabulary, ignored=0)
    loss = against(given, labels, temperature=2.0, hard_weight=0.3, chunk_size=rows, **options)

    def step():
        for leaf in student:
            leaf.grad = None
        loss(*student).backward()

    step()
    for leaf in student:
        leaf.grad = None
    predicted = tightfit.trace(step, device="cpu").peak_bytes
    resident = [*student, *given, labels]
    measured = measured_peak(step, resident)
    assert abs(predicted - measured) <= ROUNDING
    gradients, chunk = sum(leaf.nbytes for leaf in student), 2 * rows * vocabulary * 4
    of_a_part, per_token = 3 * (rows // 8) * vocabulary * 4, 64 * tokens
    states = rows * (width + TEACHER_WIDTH) * 4
    of_everything = measured - sum(tensor.nbytes for tensor in resident)
    assert of_everything <= gradients + chunk + of_a_part + states + per_token
    assert of_everything < 2 * tokens * vocabulary * 4  # two full tensors of logits alone


def test_ignored_tokens_are_dropped_first_and_what_they_hold_does_not_matter():
    labels, (hidden, weight, bias), (states, *of_teacher) = some_labels(), sample(), teacher()
    ignored = (labels == IGNORED)[:, None]
    spoilt = hidden.masked_fill(ignored, torch.nan).requires_grad_()
    with OperatorLog() as log:
        loss = against([states.masked_fill(ignored, torch.nan), *of_teacher], labels)(spoilt, weight, bias)
    assert max(shape[0] for shape in log.shapes if shape[1:] == (VOCABULARY,)) == (~ignored).sum().item() < TOKENS
    loss.backward()
    assert torch.equal(loss, against([states, *of_teacher], labels)(hidden, weight, bias))
    assert spoilt.grad is not None
    assert not spoilt.grad[ignored.squeeze(1)].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_a_label_that_counts_the_loss_and_its_gradients_are_zero(reduction):
    for tokens in (0, 9):
        inputs = [tensor.requires_grad_() for tensor in sample(tokens=tokens)]
        labels = torch.full((tokens,), IGNORED)
        loss = against(teacher(tokens=tokens), labels, reduction=reduction)(*inputs)
        loss.sum().backward()
        assert not loss.any()
        assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in inputs)


def test_ragged_micro_batches_add_up_to_the_gradient_of_the_whole_batch():
    labels, (states, *of_teacher) = some_labels(), teacher(torch.float64)
    labels[11:22] = IGNORED  # a micro-batch without a label that counts
    hidden, weight, bias = (tensor.double().requires_grad_() for tensor in sample())
    whole = torch.autograd.grad(against([states, *of_teacher], labels)(hidden, weight, bias), (hidden, weight, bias))
    valid = (labels != IGNORED).sum()
    for part in (slice(0, 11), slice(11, 22), slice(22, None)):
        loss = against([states[part], *of_teacher], labels[part], reduction="sum")
        (loss(hidden[part], weight, bias) / valid).backward()
    for leaf, gradient in zip((hidden, weight, bias), whole, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one():
    hidden, weight, bias = sample(vocabulary=301)  # above 256, so that no block of the weight has its shape
    hidden.requires_grad_()
    with OperatorLog() as log:
        against(teacher(vocabulary=301), some_labels())(hidden, weight, bias).backward()
    assert (301, WIDTH) not in log.shapes
    assert hidden.grad is not None
    assert weight.grad is bias.grad is None


def test_a_retained_graph_gives_the_same_gradients_again_and_a_second_derivative_is_refused():
    inputs = [tensor.requires_grad_() for tensor in sample()]
    loss = against(teacher(), some_labels())(*inputs) * 3
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, inputs, retain_graph=True)]
    assert all(map(torch.equal, first, torch.autograd.grad(loss, inputs, retain_graph=True)))
    gradient = torch.autograd.grad(loss, inputs, create_graph=True)[0]
    with pytest.raises(InputError, match=r"^distillation_loss: cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_hidden_states_are_compared_through_a_projection(projected, reduction):
    hidden, projection, bias = sample(vocabulary=TEACHER_WIDTH)
    states, labels = teacher(torch.float64)[0], some_labels()
    if not projected:
        states = states[:, :WIDTH]

    def with_loss(loss, **options):
        def call(hidden, *head):
            given = dict(zip(("projection", "bias"), head, strict=False))
            return loss(hidden, states, labels, reduction=reduction, **given, **options)

        return call

    inputs = [hidden, projection, bias] if projected else [hidden]
    ours = results(with_loss(hidden_state_loss, chunk_size=5), inputs, torch.float64)
    plain = results(with_loss(plain_hidden_state_loss), inputs, torch.float64)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    if projected and reduction == "mean":
        counted = labels != IGNORED
        expected = F.mse_loss(F.linear(*(t.double() for t in (hidden, projection, bias)))[counted], states[counted])
        torch.testing.assert_close(ours[0], expected)


def call(hidden, weight, bias, states, of_teacher, labels, **options):
    return distillation_loss(hidden, weight, states, of_teacher, labels, bias=bias, **options)


BAD = {
    "the student's vocabulary has 61 tokens, the teacher's 60: tokens are compared": lambda s, t, y: call(
        *s, t[0], t[1][1:], y
    ),
    r"teacher_hidden \(33, 11\), teacher_weight \(61, 12\) do not fit": lambda s, t, y: call(*s, t[0][:, 1:], t[1], y),
    r"the student has 33 tokens: give both models the same": lambda s, t, y: call(*s, t[0][1:], t[1], y),
    r"teacher_bias \(60,\)": lambda s, t, y: call(*s, *t[:2], y, teacher_bias=t[2][1:]),
    "teacher_hidden is torch.float32, teacher_weight is torch.float64": lambda s, t, y: call(
        *s, t[0], t[1].double(), y
    ),
    r"hidden \(33, 8\), weight \(61, 7\)": lambda s, t, y: call(s[0], s[1][:, 1:], s[2], *t[:2], y),
    "label 61 is outside the vocabulary of 61": lambda s, t, y: call(*s, *t[:2], y.clamp(min=61)),
    "divergence='kl' is unknown: use 'forward_kl', 'reverse_kl', 'jsd', 'logits_mse'": lambda s, t, y: call(
        *s, *t[:2], y, divergence="kl"
    ),
    "beta=1.5 is not between 0 and 1": lambda s, t, y: call(*s, *t[:2], y, beta=1.5),
    "temperature=0 is not above 0": lambda s, t, y: call(*s, *t[:2], y, temperature=0),
    "temperature=nan is not above 0": lambda s, t, y: call(*s, *t[:2], y, temperature=float("nan")),
    "hard_weight=-1 is not between 0 and 1": lambda s, t, y: call(*s, *t[:2], y, hard_weight=-1),
    "reduction='avg' is unknown": lambda s, t, y: call(*s, *t[:2], y, reduction="avg"),
    "chunk_size=0 is less than 1": lambda s, t, y: call(*s, *t[:2], y, chunk_size=0),
    "widths differ: give a projection": lambda s, t, y: hidden_state_loss(s[0], t[0], y),
    r"the projection is \(E, D\)": lambda s, t, y: hidden_state_loss(s[0], t[0], y, projection=s[1]),
    "belongs to a projection": lambda s, t, y: hidden_state_loss(s[0], s[0], y, bias=s[2]),
}


@pytest.mark.parametrize(("message", "wrong"), BAD.items(), ids=BAD)
def test_inputs_that_do_not_fit_are_refused_in_one_line(message, wrong):
    with pytest.raises(InputError, match=message) as caught:
        wrong(sample(), teacher(), some_labels())
    assert "\n" not in str(caught.value)
