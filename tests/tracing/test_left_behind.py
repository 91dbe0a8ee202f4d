"""What a dry run leaves behind: nothing that holds the model."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tightfit

COPIED: list[dict] = []  # not the model's: what a dry run changes in a model is put back


class CopyingMethods(nn.Module):
    """Copies the methods of tensors while it runs, as dynamo does where it is first imported in a step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        COPIED.append(dict(torch.Tensor.__dict__))
        return self.linear(x).sum()


@pytest.mark.keeps("dry-run-leaves-nothing")
def test_methods_that_are_copied_meanwhile_hold_nothing_of_the_step():
    model = CopyingMethods()
    tightfit.estimate(model, (torch.zeros(2, 8),), loss=lambda model, batch: model(*batch))
    methods, weight = COPIED[0], weakref.ref(model.linear.weight)
    del model
    gc.collect()
    assert weight() is None
    assert methods["tolist"](torch.ones(2)) == [1.0, 1.0]
