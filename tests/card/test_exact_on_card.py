"""Levers are bit-equal to the plain run on CUDA's path: PyTorch's own CUDA code on a null card, with true values.

In the same order as a CPU, and on cards whose side streams, or whose default stream, work as late as they may.
"""

import functools

import pytest
import torch
from torch import nn
from trap_cases import CASES
from trap_levers import LEVERS
from trap_offloads import WAYS

import tightfit
from exactness import Outcome, assert_bit_equal, run
from tightfit.devices.nullcard.references import REFERENCES
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL

pytestmark = [pytest.mark.usefixtures("values"), pytest.mark.keeps("card-traps-captured-recomputed")]

# Their blocks hold tensors or generators of the CPU, or call numpy: they are for CPUs.
FOR_CPUS = frozenset(name for name in CASES if "numpy" in name) | {
    "a user's own generator", "attention with a boolean mask", "attention with a float mask and dropout",
    "an operator of another library",
    "LSTM", "GRU",  # cuDNN's state of dropout moves with each call, so no two steps are alike: below, without it
}  # fmt: skip
ON_CARDS = [name for name in CASES if name not in FOR_CPUS]


def step(name, levers=None) -> Outcome:
    case = CASES[name]
    model, inputs = case.build()
    with torch.device("cuda"):  # blocks that make tensors make them where their input is
        return run(
            model.cuda(), inputs.detach().cuda().requires_grad_(), case.loss, backward=case.backward, levers=levers
        )


@functools.cache
def plain_step(name) -> Outcome:
    return step(name)


def test_most_traps_are_traps_for_cards_too():
    assert len(ON_CARDS) >= 90


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ON_CARDS)
def test_the_plain_step_is_repeatable(name):
    assert_bit_equal(plain_step(name), step(name))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("name", ON_CARDS)
def test_recompute_leaves_everything_bit_equal(name, lever):
    assert_bit_equal(plain_step(name), step(name, LEVERS[lever]))


@pytest.mark.sampled(8)  # each is recorded, which takes a second
@pytest.mark.filterwarnings("ignore::UserWarning")  # blocks that cannot be captured say so
@pytest.mark.parametrize("policy", [KEEP_ALL, RECOMPUTE_ALL], ids=["keep all", "recompute all"])
@pytest.mark.parametrize("name", ON_CARDS)
def test_captured_blocks_leave_everything_bit_equal(name, policy):
    assert_bit_equal(plain_step(name), step(name, lambda m: tightfit.capture(m, "layers.*", policy=policy)))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ON_CARDS)
def test_recompute_by_hand_leaves_everything_bit_equal(name):
    assert_bit_equal(plain_step(name), step(name, lambda m: tightfit.recompute(m, "layers.*")))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ON_CARDS)
def test_offload_leaves_everything_bit_equal(name, way):
    assert_bit_equal(plain_step(name), step(name, WAYS[way]))


RECURRENT = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Recurrent(nn.Module):
    """Blocks of two recurrent layers in both directions, with cuDNN's dropout between them or without."""

    def __init__(self, kind, dropout):
        super().__init__()
        self.layers = nn.ModuleList(
            kind(16, 8, 2, dropout=dropout, batch_first=True, bidirectional=True) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0].tanh()
        return x


@pytest.mark.usefixtures("null_card")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(("dropout", "precision"), [(0.0, "fp32"), (0.3, "fp32"), (0.0, "bf16")])
@pytest.mark.parametrize("lever", {**LEVERS, **WAYS})
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_networks_leave_everything_bit_equal(kind, lever, dropout, precision, values, monkeypatch):
    """PyTorch looks at all weights of a network as one tensor, by an operator that exchanges memory."""
    state, drawn = torch.zeros(8, dtype=torch.uint8), []

    def counted(results, dropout_state, **named):
        # One state in the place of those that PyTorch has: which of them a call gets depends on the calls before.
        drawn.append(named["dropout"])
        return REFERENCES["aten::_cudnn_rnn"](results, state, **named)

    monkeypatch.setattr(values, "references", {**REFERENCES, "aten::_cudnn_rnn": counted})

    def stepped(lever=None) -> Outcome:
        torch.manual_seed(0)
        model, x = Recurrent(RECURRENT[kind], dropout).cuda(), torch.randn(4, 6, 16, device="cuda", requires_grad=True)
        state.zero_()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            return run(model, x, levers=lever)

    assert_bit_equal(stepped({**LEVERS, **WAYS}[lever]), stepped())
    assert set(drawn) == {dropout}
