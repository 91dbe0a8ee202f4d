"""Recurrent layers: padded, packed by lengths, and in PyTorch's and oneDNN's kernels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import tightfit
from round_device import round_device
from tightfit.runtime.internals import installed_release
from tightfit.tracing import recurrent
from tiny import allocator_peak

WIDTH, LENGTH = 32, 24
BATCH = {"ids": torch.arange(6 * LENGTH).reshape(6, LENGTH) % 64, "lengths": torch.tensor([24, 10, 3, 24, 17, 1])}


def as_padded(rnn, x, lengths):
    return rnn(x)[0]


def packed_batch_first(rnn, x, lengths):
    packed, _ = rnn(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)[0]


def packed_in_order(rnn, x, lengths):
    rnn.batch_first = False
    packed, _ = rnn(pack_padded_sequence(x.transpose(0, 1), lengths.sort(descending=True)[0]))
    return pad_packed_sequence(packed, total_length=LENGTH)[0].transpose(0, 1)


def as_sequences(rnn, x, lengths):
    packed, _ = rnn(pack_sequence([x[i, :n] for i, n in enumerate(lengths.tolist())], enforce_sorted=False))
    return pad_packed_sequence(packed, batch_first=True, total_length=LENGTH)[0]


class Tagger(nn.Module):
    def __init__(self, kind, use, **settings):
        super().__init__()
        self.embed, self.use = nn.Embedding(64, WIDTH), use
        self.rnns = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True, **settings) for _ in range(2))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids, lengths):
        x = self.embed(ids)
        for rnn in self.rnns:
            y = self.use(rnn, x, lengths)
            x = x + y[..., :WIDTH] + y[..., -WIDTH:]
        return self.head(x)


ONE_STATE = 6 * WIDTH * 4  # bytes: oneDNN's backward makes zeros for the gradients of last states, one more or less


def loss(model, batch):
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["ids"].flatten())


@pytest.mark.sampled(3)
@pytest.mark.keeps("estimates-lstm-gru-rnn")
@pytest.mark.parametrize(
    "use", [as_padded, packed_batch_first, packed_in_order, as_sequences], ids=lambda use: use.__name__
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_estimate_is_the_measured_peak(kind, use):
    found = tightfit.estimate(Tagger(kind, use), BATCH, loss=loss, optimizer="sgd", device=round_device())
    measured = allocator_peak(Tagger(kind, use), BATCH, loss=loss, optimizer="sgd")
    of_onednn = kind is nn.LSTM and use is as_padded
    assert found.peak_bytes == pytest.approx(measured, abs=ONE_STATE * of_onednn)


@pytest.mark.parametrize("settings", [{"bidirectional": True, "num_layers": 2}, {"bias": False}])
def test_of_several_layers_and_directions_too(settings):
    found = tightfit.estimate(Tagger(nn.LSTM, as_padded, **settings), BATCH, loss=loss, device=round_device())
    measured = allocator_peak(Tagger(nn.LSTM, as_padded, **settings), BATCH, loss=loss)
    # Before torch 2.13 a layer without biases takes 2.6% of this step less than predicted; the cause was not traced.
    unmade = 0.03 * measured if installed_release() < (2, 13) and "bias" in settings else 0
    assert -ONE_STATE <= found.peak_bytes - measured <= ONE_STATE + unmade


@pytest.mark.slow  # a plan, and both steps
def test_a_plan_of_packed_sequences_is_bit_equal():
    plan = tightfit.plan(Tagger(nn.LSTM, packed_batch_first), BATCH, "0.95x", loss=loss, device=round_device())
    assert tightfit.verify(Tagger(nn.LSTM, packed_batch_first), BATCH, plan, loss=loss).ok


@pytest.mark.parametrize("x", [(130, 8, 16), (64, 130, 16), (130, 70, 16), (65, 1, 16)])
def test_the_workspace_of_a_large_layer_is_that_of_four_small_ones(monkeypatch, x):
    whole = recurrent.taken(x, 24, torch.float32)
    monkeypatch.setattr(recurrent, "_AT_ONCE", 0)
    assert recurrent.taken(x, 24, torch.float32).workspace == pytest.approx(whole.workspace, rel=0.005)
