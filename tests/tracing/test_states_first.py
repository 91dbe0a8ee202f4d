"""The optimizer's states are made first, and the first forward and backward is recorded where later ones are as it."""

import pytest
import torch
from torch import nn

from tightfit.step import Part, StepSettings
from tightfit.tracing import step
from tiny import decoder, token_batch

WIDTH = 48


class Counted(nn.Module):
    """Layers whose forward is counted, in a list that belongs to nobody."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        CALLS.append(type(self).__name__)
        return self.second(self.first(x).relu())


class Unused(Counted):
    """With a trained weight that no backward reaches."""

    def __init__(self):
        super().__init__()
        self.beside = nn.Linear(WIDTH, 3 * WIDTH)


class Caching(Counted):
    """Keeps a table that its first forward makes."""

    table: torch.Tensor | None = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.rand(300, WIDTH).cumsum(0)
        return super().forward(x + self.table[0])


class Initialised(Counted):
    """Its first forward sees to a scale, with scratch that no later one has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.fresh = True

    def forward(self, x):
        if self.fresh:
            self.scale.copy_(torch.cat([x] * 40).std())
            self.fresh = False
        return super().forward(x / self.scale)


class Normalised(Counted):
    """Moves running means."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


CALLS: list[str] = []


def mean(model, batch):
    return model(batch).mean()


def seen_in(trace):
    """What a trace says, without numbers of values and calls, which go on counting from step to step."""
    operators = [
        record._replace(reads=len(record.reads), makes=len(record.makes), call=0) for record in trace.operators
    ]
    alive = sorted((s.category, s.name, s.bytes, s.born, s.died) for s in trace.storages if s.died != 0)
    return operators, trace.levels, trace.starts, trace.with_gradient, trace.repeated, str(alive)


def traces(make, monkeypatch, **how):
    """A step's trace, and that of the second of two whole steps."""
    found = []
    for first in (True, False):
        with monkeypatch.context() as patch:
            if not first:
                patch.setattr(step, "needs_no_gradients", lambda *_: False)
            model, batch, loss = make()
            CALLS.clear()
            found.append((step.trace_step(model, [Part(batch, 1.0)], loss, **how), len(CALLS)))
    return found


@pytest.mark.parametrize(
    ("kind", "forwards"), [(Counted, 1), (Unused, 2), (Caching, 2), (Initialised, 2), (Normalised, 2)]
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_record_is_that_of_the_second_whole_step(kind, forwards, optimizer, monkeypatch):
    (found, ran), (wanted, ran_twice) = traces(
        lambda: (kind(), torch.rand(16, WIDTH), mean), monkeypatch, optimizer=optimizer
    )
    assert (ran, ran_twice) == (forwards, 2)
    assert seen_in(found) == seen_in(wanted)


def test_a_decoder_runs_forward_once(monkeypatch):
    runs = []

    def loss(model, batch):
        runs.append(1)
        return model(**batch).loss

    (found, _), (wanted, _) = traces(
        lambda: (decoder(), token_batch(2, 32), loss), monkeypatch, settings=StepSettings(grad_clip=1.0)
    )
    assert len(runs) == 1 + 2
    assert seen_in(found) == seen_in(wanted)


@pytest.mark.parametrize("how", ["keep_gradients", "step_in_backward"])
def test_where_gradients_do_not_simply_come_and_go_two_steps_run(how, monkeypatch):
    (_, ran), _ = traces(
        lambda: (Counted(), torch.rand(16, WIDTH), mean), monkeypatch, settings=StepSettings(**{how: True})
    )
    assert ran == 2
