"""Scores are those of one row at a time through all logits, in memory that is known before."""

import itertools

import pytest
import torch
from lettered_questions import ASKED, tokenizer
from torch import nn

from tightfit import score_choices
from tightfit.errors import CannotFit, InputError, ModelError
from tightfit.tracing.step import trace_inference
from tightfit.training.multiple_choice import scoring
from tightfit.training.multiple_choice.batching import batched, by_tokens, equal, maximal
from tightfit.training.multiple_choice.likelihood import ScoredRow, Target, batch_of, log_likelihoods, reading, rows_of
from tightfit.training.multiple_choice.prompts import ScoredChoice, encode_pair, lettered_context, requests_of
from tightfit.training.multiple_choice.questions import subject_of
from tiny import decoder


class Words:
    """A tokenizer whose tokens are words with the space before them; `ab` after `x` becomes one token with it."""

    end_of_text = 0

    def __init__(self):
        self.known = {}

    def encode(self, text):
        merged = text.replace("x ab", "x~ab")
        parts = [part for part in merged.replace(" ", "\n ").split("\n") if part]
        return [self.known.setdefault(part, len(self.known) + 1) for part in parts]


def by_the_harness(codec, context, continuation):
    """lm-evaluation-harness's `_encode_pair`, from its description."""
    spaces = len(context) - len(context.rstrip())
    if spaces > 0:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    whole, before = codec.encode(context + continuation), codec.encode(context)
    return before, whole[len(before) :]


@pytest.mark.keeps("choices-scored-padded-batches")
@pytest.mark.parametrize("context", ["The sky is", "The sky is  ", "ends in x", "one"])
@pytest.mark.parametrize("choice", [" blue", " ab and more", " a kind of cheese"])
@pytest.mark.parametrize("codec", [Words(), tokenizer()], ids=["words", "bpe"])
def test_the_boundary_of_context_and_choice_is_the_harnesss(codec, context, choice):
    before, following = by_the_harness(codec, context, choice)
    assert encode_pair(codec, context, choice, "here") == (tuple(before), tuple(following))


def test_without_a_context_a_text_begins():
    codec = tokenizer()
    assert encode_pair(codec, "", "blue", "here") == ((codec.end_of_text,), tuple(codec.encode("blue")))


def test_the_lettered_prompt_is_that_of_mmlu_and_in_chinese_that_of_c_eval():
    english, chinese = subject_of(
        [{"question": q, "choices": ["no", "yes"], "answer": "yes"} for q in ("Is it?", "是吗？")]
    ).questions
    assert lettered_context(english) == "Is it?\nA. no\nB. yes\nAnswer:"
    assert lettered_context(chinese) == "是吗？\nA. no\nB. yes\n答案："
    codec = Words()
    asked = requests_of(english, codec, lettered=True)
    assert [codec.encode(" A"), codec.encode(" B")] == [list(request.continuation) for request in asked]
    assert {request.characters for request in asked} == {1}


def one_at_a_time(model, requests):
    """Each request by the definition: one row, all logits, fp64."""
    sums = []
    for request in requests:
        ids = torch.tensor([request.context + request.continuation])
        with torch.no_grad():
            scores = model(input_ids=ids[:, :-1]).logits.double().log_softmax(-1)[0]
        last = len(request.continuation)
        sums.append(scores[-last:].gather(1, ids[0, -last:, None]).sum().item())
    return sums


def requests(lettered=False, codec=None):
    return [r for q in subject_of(ASKED).questions for r in requests_of(q, codec or tokenizer(), lettered=lettered)]


@pytest.mark.keeps("choices-scored-padded-batches")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("prompt", ["text", "letters"])
@pytest.mark.parametrize("how", [{}, {"batch_size": 1}, {"batch_size": 5}, {"budget": "3MiB"}], ids=str)
def test_scores_in_padded_batches_are_those_of_each_choice_alone(prompt, how):
    model = decoder(dropout=0.5).double()
    found = score_choices(model, ASKED, tokenizer=tokenizer(), prompt=prompt, **how)
    truth = one_at_a_time(model.eval(), requests(prompt == "letters"))
    torch.testing.assert_close(
        torch.tensor(list(itertools.chain(*(one.log_likelihoods for one in found.answered))), dtype=torch.float64),
        torch.tensor(truth, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-10,
    )
    each = [truth[first : first + 3] for first in range(0, len(truth), 3)]
    lengths = [1, 1, 1] if prompt == "letters" else [len(choice) for choice in ASKED[0]["choices"]]
    assert [one.chosen for one in found.answered] == [scores.index(max(scores)) for scores in each]
    normalised = [[s / n for s, n in zip(scores, lengths, strict=True)] for scores in each]
    assert [one.chosen_normalised for one in found.answered] == [scores.index(max(scores)) for scores in normalised]
    right = [one.chosen == asked["answer"] for one, asked in zip(found.answered, ASKED, strict=True)]
    share = sum(right) / 12
    assert found.overall.accuracy == share
    assert found.overall.standard_error == pytest.approx(torch.tensor(right).double().std().item() / 12**0.5)


def test_the_standard_error_of_one_question_is_not_known():
    found = score_choices(decoder(), ASKED[:1], tokenizer=tokenizer())
    assert found.overall.standard_error is None


def test_letters_after_one_question_are_read_once():
    rows, _ = rows_of(requests(lettered=True), None)
    assert len(rows) == 9  # of twelve questions nine differ
    assert sorted(target.request for row in rows for target in row.targets) == list(range(36))


@pytest.mark.keeps("choices-scored-padded-batches")
def test_a_context_beyond_the_positions_loses_its_beginning_and_is_counted():
    model = decoder(max_position_embeddings=12).double()
    found = score_choices(model, ASKED, tokenizer=tokenizer(), prompt="text")
    asked = requests()
    limited = [
        ScoredChoice((r.context + r.continuation)[-13:][: -len(r.continuation)], r.continuation, r.characters)
        for r in asked
    ]
    assert found.cut == sum(len(r.context) + len(r.continuation) > 13 for r in asked) > 0
    truth = one_at_a_time(model.eval(), limited)
    assert found.answered[8].log_likelihoods == pytest.approx(truth[24:27], rel=1e-9)


def test_a_choice_longer_than_the_positions_is_refused():
    asked = [{"question": "x", "choices": ["cheese " * 30, "b"], "answer": 0}]
    with pytest.raises(ModelError, match=r"a choice has \d+ tokens, the model's positions reach 8"):
        score_choices(decoder(max_position_embeddings=8), asked, tokenizer=tokenizer())


@pytest.mark.sampled(2)
@pytest.mark.keeps("predicted-peak-multiple-choice")
@pytest.mark.parametrize("how", [{"batch_size": 1}, {"batch_size": 5}, {"budget": "3MiB"}, {"budget": "9MiB"}], ids=str)
def test_the_predicted_peak_is_the_allocators_and_within_the_budget(how):
    found = score_choices(decoder(), ASKED, tokenizer=tokenizer(), **how)
    assert found.predicted_peak_bytes == found.measured_peak_bytes
    if found.budget_bytes is not None:
        assert found.measured_peak_bytes <= found.budget_bytes


@pytest.mark.keeps("predicted-peak-multiple-choice")
def test_no_batch_exceeds_the_predicted_peak_and_a_larger_budget_has_larger_batches():
    model, codec = decoder(), tokenizer()
    rows, _ = rows_of(requests(codec=codec), 512)
    sizes = []
    for budget in (2 * 2**20, 3 * 2**20, 4 * 2**20):
        with reading(model, torch.tensor([rows[-1].ids])):

            def peak(batch):
                return trace_inference(model, batch_of(batch, 0), log_likelihoods).peak_bytes

            found = batched(rows, peak, budget_bytes=budget)
            assert max(map(peak, found.batches)) == found.predicted_peak_bytes <= budget
        assert [row for batch in found.batches for row in batch] == rows
        sizes.append(len(found.batches[0]))
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_budget_below_one_row_says_the_least_and_so_does_a_given_size():
    with pytest.raises(CannotFit, match=r"the least is .*, one row at a time, and the budget is 600.00 KiB") as caught:
        score_choices(decoder(), ASKED, tokenizer=tokenizer(), budget="600KiB")
    alone = score_choices(decoder(), ASKED, tokenizer=tokenizer(), batch_size=1).predicted_peak_bytes
    assert caught.value.least_bytes == alone
    with pytest.raises(CannotFit, match=r"batches of 36 rows take .*leave the batch size to the budget"):
        score_choices(decoder(), ASKED, tokenizer=tokenizer(), budget="1MiB", batch_size=36)


@pytest.mark.keeps("predicted-peak-multiple-choice")
def test_only_the_logits_that_are_asked_for_exist():
    model = decoder(vocab_size=8000)
    rows, _ = rows_of(requests(), 512)
    batch = batch_of(rows[:6], 0)
    every = batch["input_ids"].numel() * 8000 * 4
    model.eval()
    assert trace_inference(model, batch, log_likelihoods).peak_bytes > every
    with reading(model, batch["input_ids"][:1, :4]):
        needed = trace_inference(model, batch, log_likelihoods).peak_bytes
        assert "forward" in model.head.__dict__
    assert needed < every / 2
    assert "forward" not in model.head.__dict__


class Capped(nn.Module):
    """Caps its logits, as Gemma does: they go through more than the head."""

    def __init__(self):
        super().__init__()
        self.inner = decoder()

    def forward(self, input_ids):
        output = self.inner(input_ids)
        return output._replace(logits=30 * (output.logits / 30).tanh())


def test_logits_that_are_capped_are_scored_as_they_are_and_predicted():
    model = Capped().double()
    found = score_choices(model, ASKED, tokenizer=tokenizer())
    assert found.answered[2].log_likelihoods == pytest.approx(one_at_a_time(model, requests())[6:9], rel=1e-9)
    # The allocator also records the two numbers 30 as tensors.
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=1e-4)


def test_each_module_is_left_in_the_mode_it_was_in_and_no_gradient_is_made():
    model = decoder().train()
    model.layers[0].eval()
    score_choices(model, ASKED[:2], tokenizer=tokenizer())
    assert model.training
    assert not model.layers[0].training
    assert all(p.grad is None for p in model.parameters())


def test_a_score_that_is_no_number_is_never_chosen():
    assert scoring._largest([float("nan"), -3.0, -2.0]) == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tokenizer": None}, "a model without its tokenizer"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"prompt": "words"}, "prompt 'words' is unknown: use auto, letters or text"),
        ({"budget": "0.5x"}, "share of the plain peak"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(how, message):
    with pytest.raises(InputError, match=message):
        score_choices(decoder(), ASKED[:1], **{"tokenizer": tokenizer(), **how})


# Batches alone


def row(length, counted=1):
    return ScoredRow(tuple(range(length)), (Target(0, 0, tuple(range(counted))),))


def price(batch):
    """A peak that grows in rows, length and logits."""
    return len(batch) * max(len(r.ids) for r in batch) * 10 + sum(r.counted for r in batch)


def test_only_batches_that_no_other_exceeds_are_run_dry():
    rows = [row(length) for length in range(40, 0, -1)]
    asked = []
    found = batched(rows, lambda batch: asked.append(batch) or price(batch), batch_size=4)
    assert asked == [found.batches[0]]
    assert maximal([(row(4),), (row(3), row(3)), (row(2), row(2)), (row(4),)]) == [0, 1]


@pytest.mark.parametrize("budget", [420, 500, 900, 5000, 10**6])
def test_batches_of_short_rows_are_larger_and_none_exceeds_the_budget(budget):
    rows = [row(length, counted=length % 5 + 1) for length in range(40, 0, -1)]
    found = batched(rows, price, budget_bytes=budget)
    assert max(map(price, found.batches)) == found.predicted_peak_bytes <= budget
    assert [r for batch in found.batches for r in batch] == rows
    sizes = [len(batch) for batch in found.batches[:-1]]
    assert sizes == sorted(sizes)


def test_every_row_is_in_one_batch():
    rows = [row(length) for length in (9, 7, 7, 2, 1)]
    assert [len(batch) for batch in equal(rows, 2)] == [2, 2, 1]
    assert [len(batch) for batch in by_tokens(rows, 14)] == [1, 2, 2]
