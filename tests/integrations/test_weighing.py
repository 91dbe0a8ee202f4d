"""What micro-batches count is measured: a loss does not say what it divides by."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tightfit.errors import LeverError
from tightfit.integrations.weighing import NEXT_TOKENS, SUM, measure_weighing
from tightfit.levers.micro_batch import IGNORE_INDEX, as_parts, split_batch, valid_tokens

pytestmark = pytest.mark.keeps("plan-takes-micro-batches", "weight-micro-batch-batch")

VOCABULARY = 50


class Model(nn.Module):
    """Logits for each token, with dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids):
        return self.head(self.dropout(self.embedding(ids).cumsum(1)))


def batch(size=4, length=24):
    ids = torch.arange(size * length).view(size, length) * 7 % VOCABULARY
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.roll(1, 1)}


def cross_entropy(logits, labels, reduction="mean"):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)


def sum_of_next(model, batch):
    return cross_entropy(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:], "sum") / 92


def mean_of_next(model, batch):
    return cross_entropy(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])


def mean_of_labels(model, batch):
    return cross_entropy(model(batch["input_ids"]), batch["labels"])


def mean_of_samples(model, batch):
    return model(batch["input_ids"]).square().mean()


def mean_of_unmasked(model, batch):
    mask = batch["attention_mask"]
    return (model(batch["input_ids"]).square().mean(-1) * mask).sum() / mask.sum()


def of_pairs(model, batch):
    vectors = model(batch["input_ids"])[:, -1]
    return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


def only_whole(model, batch):
    return model(batch["input_ids"]).view(2, -1).std(0).mean()[None].sum() if len(batch["input_ids"]) > 1 else 1 / 0


@pytest.mark.parametrize("loss", [sum_of_next, mean_of_next, mean_of_labels, mean_of_samples])
@pytest.mark.parametrize("ragged", [False, True])
def test_with_the_weighing_that_is_found_micro_batches_make_the_loss_of_their_batch(loss, ragged):
    whole = batch()
    found = measure_weighing(Model(), whole, loss)
    if ragged:
        whole["labels"][1, 4:] = IGNORE_INDEX
        whole["labels"][3, :20] = IGNORE_INDEX

    def counted(model, part):
        return loss(model, part)

    counted.reduction, counted.count = "sum" if found.count is None else "mean", found.count
    model = Model().eval()
    parts = as_parts(split_batch(whole, 3), counted)
    total = sum(part.weight * loss(model, part.batch) for part in parts)
    assert total.item() == pytest.approx(loss(model, whole).item(), rel=1e-5)


def test_the_first_label_counts_only_where_the_loss_does_not_shift():
    assert measure_weighing(Model(), batch(), sum_of_next) is SUM
    assert measure_weighing(Model(), batch(), mean_of_next) is NEXT_TOKENS
    assert measure_weighing(Model(), batch(), mean_of_labels).count(batch(2, 5)) == 10


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (mean_of_unmasked, "do not combine into the batch loss"),
        (of_pairs, "do not combine"),
        (only_whole, "division by zero"),
    ],
)
def test_a_loss_that_does_not_come_of_its_parts_is_told(loss, why):
    with pytest.raises(LeverError, match=why):
        measure_weighing(Model(), batch(), loss)


def test_measuring_moves_nothing():
    model, whole = Model(), batch()
    model.dropout.eval()
    before, state = {n: t.clone() for n, t in whole.items()}, torch.get_rng_state()
    measure_weighing(model, whole, mean_of_next)
    assert (model.training, model.dropout.training, model.head.training) == (True, False, True)
    assert torch.get_rng_state().equal(state)
    assert all(p.grad is None for p in model.parameters())
    assert all(whole[name].equal(value) for name, value in before.items())


def test_labels_that_are_numbers_or_one_a_sample_are_not_shifted():
    ids = torch.ones(4, 6, dtype=torch.int64)
    assert valid_tokens({"input_ids": ids, "labels": ids}) == 20
    assert valid_tokens({"input_ids": ids, "labels": torch.ones(4, 1)}) == 4
    assert valid_tokens({"input_ids": ids, "labels": torch.ones(4, 3)}) == 4
    assert valid_tokens({"input_ids": ids, "labels": torch.tensor([[1], [1], [1], [IGNORE_INDEX]])}) == 3
    assert valid_tokens({"input_ids": ids, "labels": ids[:, :5]}) == 20
