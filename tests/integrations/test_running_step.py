"""The step of a running loop is planned from its first batch, and holds for later ones of the same shape."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tightfit import monitor
from tightfit.integrations.minimind.running_step import fullest, running_request
from tightfit.levers.micro_batch import IGNORE_INDEX
from tightfit.planner.api import make_estimate

VOCABULARY, WIDTH, SHAPE = 512, 16, (4, 64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.asked = None

    def forward(self, ids):
        if self.asked is None and self.training:
            self.asked = False
            with running_request(self) as request:
                self.asked = make_estimate(request).peak_bytes
        return self.head(self.embedding(ids))


def batches():
    """Hardly a label in the first, all in the second and the third."""
    ids = torch.randint(VOCABULARY, SHAPE, generator=torch.Generator().manual_seed(0))
    yield ids, torch.where(torch.arange(SHAPE[1]) < 2, ids, IGNORE_INDEX)
    yield ids, ids.clone()
    yield ids, ids.clone()


def train(model, optimizer):
    for ids, labels in batches():
        mask = (labels != IGNORE_INDEX).float()
        logits = model(ids)
        chosen = logits.view(-1, VOCABULARY)[mask.view(-1) == 1]
        loss = F.cross_entropy(chosen, labels.view(-1)[mask.view(-1) == 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.keeps("plan-holds-later-batches")
def test_a_plan_from_a_batch_with_few_labels_holds_for_one_with_many():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with monitor(model, optimizer) as watch:
        train(model, optimizer)
    # The loop still holds the batch before: a few kilobytes.
    assert watch.peak_bytes == pytest.approx(model.asked, rel=5e-3)


def test_masks_and_labels_are_full_inside_and_untouched_afterwards():
    ids, mask = torch.tensor([5, 7, 9]), torch.tensor([1.0, 0.0, 1.0])
    labels, padding = torch.tensor([IGNORE_INDEX, 7, IGNORE_INDEX]), torch.tensor([True, False, True])
    tensors = [ids, mask, labels, padding]
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    with fullest(tensors):
        assert torch.equal(ids, before[0])
        assert mask.all()
        assert padding.all()
        assert labels.tolist() == [0, 7, 0]
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert [t._version for t in tensors] == versions
