"""Captured blocks whose inputs and weights others read too: gradients are added up in the order of eager code."""

import warnings

import pytest
import torch
from random_blocks import RandomNet, differing, gradients
from torch import Tensor, nn

import tightfit
from tightfit.levers.recompute import KEEP_ALL, RECOMPUTE_ALL

pytestmark = pytest.mark.keeps("captured-blocks-add-up")

WIDTH = 32


class Net(nn.Module):
    """Three blocks that share a condition, which comes of a module or is a weight itself."""

    def __init__(self, block: type[nn.Module], *, learnt: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.condition = nn.Linear(WIDTH, WIDTH)
        self.learnt = nn.Parameter(torch.randn(16, WIDTH)) if learnt else None
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x) if self.learnt is None else self.learnt
        for block in self.blocks:
            x = block(x, condition)
        return x.square().mean()


class ReadsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.key(condition) * self.value(condition)


class ReadsNothingOfIts(ReadsTwice):
    """The stream is only asked for its size, so the blocks before have no gradient."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.key(condition) * self.value(condition) + torch.zeros_like(x)


class HasAnUnreadResult(ReadsTwice):
    def forward(self, x: Tensor, condition: Tensor):
        return x + self.key(condition), self.value(condition)


class FirstResult(Net):
    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x)
        for block in self.blocks:
            x, _ = block(x, condition)
        return x.square().mean()


def captured(model: nn.Module, x: Tensor, policy=KEEP_ALL) -> dict[str, Tensor | None]:
    with warnings.catch_warnings(), tightfit.capture(model, "blocks.*", policy=policy):
        warnings.filterwarnings("error", message=".*without being captured")
        gradients(model, x)
        return gradients(model, x)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, WIDTH)


@pytest.mark.parametrize("policy", [KEEP_ALL, RECOMPUTE_ALL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("learnt", [False, True])
def test_a_shared_input_that_blocks_read_twice_has_the_gradient_of_eager_code(x, policy, learnt):
    model = Net(ReadsTwice, learnt=learnt)
    assert differing(gradients(model, x), captured(model, x, policy)) == []


def test_blocks_whose_results_have_no_gradient_get_none(x):
    model = Net(ReadsNothingOfIts)
    plain = gradients(model, x)
    assert plain["blocks.0.key.weight"] is None
    assert differing(plain, captured(model, x)) == []


def test_weights_behind_a_result_that_nobody_reads_get_no_gradient(x):
    model = FirstResult(HasAnUnreadResult)
    plain = gradients(model, x)
    assert plain["blocks.0.value.weight"] is None
    assert differing(plain, captured(model, x)) == []


@pytest.mark.parametrize("seed", [0, 1, 2, 6])
def test_random_blocks_are_bit_equal(seed):
    model, x = RandomNet(seed), torch.randn(2, 5, 8)
    assert differing(gradients(model, x), captured(model, x)) == []


@pytest.mark.slow  # a minute: each program is recorded twice
@pytest.mark.parametrize("seed", range(100, 180))
def test_more_random_blocks_are_bit_equal(seed):
    model, x = RandomNet(seed), torch.randn(2, 5, 8)
    plain = gradients(model, x)
    for policy in (KEEP_ALL, RECOMPUTE_ALL):
        assert differing(plain, captured(model, x, policy)) == []
