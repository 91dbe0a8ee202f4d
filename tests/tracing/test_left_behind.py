"""What a dry run leaves behind: nothing that holds the model."""

import gc
import weakref

import pytest
import torch
from torch import nn

import tightfit
from tightfit.errors import CannotFit

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


def language_model():
    def block():
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    return nn.Sequential(nn.Embedding(50, 32), *[block() for _ in range(4)], nn.Linear(32, 50))


def next_token(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def no_loss(model, batch):
    next_token(model, batch)
    raise ValueError("no loss")


HOW = {"loss": next_token, "device": "cpu"}


def applies(model, batch):
    with tightfit.plan(model, batch, "0.7x", **HOW).apply(model):
        next_token(model, batch).backward()


def finds_the_largest(model, batch):
    def case(number):
        return model, {name: each.repeat(number, 1) for name, each in batch.items()}

    assert tightfit.maximise(case, 4_000_000, **HOW).above is not None  # one more had no plan


def is_refused(model, batch):
    with pytest.raises(CannotFit):
        tightfit.plan(model, batch, "0.001x", **HOW)


def raises(model, batch):
    with pytest.raises(ValueError, match="no loss"):
        tightfit.estimate(model, batch, loss=no_loss, device="cpu")


CALLS = {
    "estimate": lambda model, batch: tightfit.estimate(model, batch, **HOW),
    "plan": lambda model, batch: tightfit.plan(model, batch, "0.7x", **HOW),
    "plan that rounds": lambda model, batch: tightfit.plan(model, batch, "0.6x", levers="rounding", **HOW),
    "plan for a card": lambda model, batch: tightfit.plan(model, batch, "0.999x", loss=next_token, device="rtx4090"),
    "plan of ranks": lambda model, batch: tightfit.plan(model, batch, "0.8x", world_size=2, parallel="ddp", **HOW),
    "apply": applies,
    "curve": lambda model, batch: tightfit.curve(model, batch, **HOW),
    "maximise": finds_the_largest,
    "refused": is_refused,
    "raises": raises,
    "trace": lambda model, batch: tightfit.trace(lambda: next_token(model, batch).backward()),
    "verify": lambda model, batch: tightfit.verify(
        model, batch, tightfit.plan(model, batch, "0.7x", **HOW), loss=next_token
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.keeps("dry-run-leaves-nothing")
@pytest.mark.parametrize("name", CALLS)
def test_model_and_batch_are_freed_where_the_caller_drops_them_without_a_garbage_collection(name):
    """A cycle of ours that held them would take a card's memory until the collector comes, which nobody can plan."""
    tokens = torch.randint(0, 50, (4, 64))
    model, batch = language_model(), {"x": tokens, "y": tokens.clone()}
    held = [weakref.ref(each) for each in (model, model[0].weight, tokens)]
    gc.disable()
    try:
        result = CALLS[name](model, batch)
        del model, batch, tokens
        assert [each() is None for each in held] == [True] * 3
    finally:
        gc.enable()
    del result
