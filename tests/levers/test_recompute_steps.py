"""Recompute over more than one plain forward and backward: second backwards, double backwards, accumulation,
passes without gradients, and what is refused.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trap_cases import BLOCKS, CASES, WIDTH, Stack, plain_call
from trap_levers import LEVERS

from exactness import assert_bit_equal, run, sum_of_squares
from tightfit.errors import RecomputeError
from tightfit.levers.recompute import recompute
from tightfit.levers.recompute.replay import ALONE, references_to_value
from tightfit.levers.recompute.values import Reference

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks

SMOOTH = ["dropout", "causal attention", "in-place activations", "routed experts", "nn.TransformerEncoderLayer"]
levers = pytest.mark.parametrize("lever", LEVERS)


def stack_of(block, call=plain_call):
    torch.manual_seed(7)
    return Stack([block() for _ in range(BLOCKS)], call), torch.randn(2, 6, WIDTH, requires_grad=True)


def both(build, lever, loss=sum_of_squares, backward=torch.Tensor.backward):
    """The same step plain and frugal."""
    return (
        run(*build(), loss, backward=backward),
        run(*build(), loss, backward=backward, levers=LEVERS[lever]),
    )


def backward_twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.keeps("through-double-backward-retained")
@pytest.mark.sampled(8)
@levers
@pytest.mark.parametrize("name", SMOOTH)
def test_a_second_backward_over_a_retained_graph_is_bit_equal(name, lever):
    assert_bit_equal(*both(CASES[name].build, lever, CASES[name].loss, backward_twice))


def gradient_penalty(model, inputs):
    inputs = inputs * 1
    out = model(inputs)
    (slope,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    return out.sum() + slope.square().sum()


@pytest.mark.keeps("through-double-backward-retained")
@pytest.mark.sampled(8)
@levers
@pytest.mark.parametrize(
    "name", ["a plain MLP", "dropout", "in-place activations", "LSTM", "rotary embedding by complex numbers"]
)
def test_double_backward_is_bit_equal(name, lever):
    assert_bit_equal(*both(CASES[name].build, lever, gradient_penalty))


def three_micro_batches(model, inputs):
    for part in (inputs, inputs * 2):
        sum_of_squares(model, part).backward()
    return sum_of_squares(model, inputs.tanh())


@pytest.mark.keeps("through-double-backward-retained")
@pytest.mark.sampled(8)
@levers
@pytest.mark.parametrize("name", [*SMOOTH, "batch normalisation", "a cache that the block appends to"])
def test_gradients_accumulated_over_three_micro_batches_are_bit_equal(name, lever):
    if "cache" in name:  # a cache that grows over steps holds the graphs of earlier ones

        def loss(model, inputs):
            return sum_of_squares(model, inputs) + sum_of_squares(model, inputs * 2)
    else:
        loss = three_micro_batches
    assert_bit_equal(*both(CASES[name].build, lever, loss))


def two_graphs_at_once(model, inputs):
    first = sum_of_squares(model, inputs)
    second = sum_of_squares(model, inputs * 0.5)
    first.backward(retain_graph=True)
    return second * first


@levers
def test_two_forwards_before_their_backwards_are_bit_equal(lever):
    assert_bit_equal(*both(CASES["dropout"].build, lever, two_graphs_at_once))


def with_passes_in_between(model, inputs):
    loss = sum_of_squares(model, inputs)
    model.eval()
    with torch.no_grad():
        model.seen = model(inputs)
    with torch.inference_mode():
        model.seen_again = model(inputs).clone()
    model.train()
    return loss + sum_of_squares(model, inputs)


@pytest.mark.sampled(8)
@levers
@pytest.mark.parametrize("name", [*SMOOTH, "batch normalisation"])
def test_passes_without_gradients_in_between_are_bit_equal(name, lever):
    assert_bit_equal(*both(CASES[name].build, lever, with_passes_in_between))


@levers
def test_gradients_in_evaluation_mode_are_bit_equal(lever):
    def build():
        model, inputs = CASES["nn.TransformerEncoderLayer"].build()
        return model.eval(), inputs

    assert_bit_equal(*both(build, lever))


@levers
def test_a_frozen_block_in_evaluation_mode_takes_the_same_fast_path(lever):
    def build():
        model, inputs = CASES["nn.TransformerEncoderLayer"].build()
        model.stem.requires_grad_(False)
        model.layers.requires_grad_(False)
        return model.eval(), inputs.detach()

    assert_bit_equal(*both(build, lever))


class FailsOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails = True

    def forward(self, x):
        hidden = F.dropout(self.linear(x), 0.2)
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("the user's own mistake")
        return hidden.tanh()


@levers
def test_an_exception_in_a_block_leaves_nothing_behind(lever):
    def loss(model, inputs):
        for _ in range(BLOCKS):
            with pytest.raises(ZeroDivisionError, match="own mistake"):
                model(inputs)
        product = inputs.exp()
        assert product.grad_fn is not None
        assert product.grad_fn._raw_saved_result is not None
        return sum_of_squares(model, inputs) + product.sum()

    assert_bit_equal(*both(lambda: stack_of(FailsOnce), lever, loss))


def changed_between(model, inputs):
    """A graph whose parameters are written before its backward."""
    loss = sum_of_squares(model, inputs)
    with torch.no_grad():
        model.layers[1].first.weight.add_(1.0)
    return loss


@pytest.mark.parametrize("lever", ["whole blocks", "two segments", "products kept"])
def test_a_parameter_written_before_backward_is_refused_as_autograd_does(lever):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(*CASES["a plain MLP"].build(), changed_between)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(*CASES["a plain MLP"].build(), changed_between, levers=LEVERS[lever])


def refused(change):
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            hidden = self.linear(x)
            return hidden + change(hidden.detach() * 2).sum()

    return Refused


def exchange(x):
    x.data = x.data.clone()
    return x


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x: x.resize_(3), "aten.resize_"),
        (lambda x: x.resize_as_(torch.ones(2)), "aten.resize_"),
        (lambda x: x.set_(torch.ones(2)), "aten.set_"),
        (exchange, r"\.data"),
    ],
)
def test_exchanging_the_memory_of_a_tensor_is_refused_by_name(change, named):
    model, inputs = stack_of(refused(change))
    with recompute(model, "layers.*"), pytest.raises(RecomputeError, match=rf"layers\.0.*{named}.*leave this block"):
        model(inputs)


def test_a_saved_tensor_that_is_written_afterwards_is_refused_or_right():
    def loss(model, inputs):
        hidden = model.stem(inputs)
        out = model.layers[0](hidden)
        hidden.mul_(2)
        return out.sum()

    model, inputs = CASES["a plain MLP"].build()
    with recompute(model, "layers.*"), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(model, inputs).backward()


def test_recompute_draws_nothing_from_a_generator_that_the_user_seeds_before_backward():
    def loss(model, inputs):
        value = sum_of_squares(model, inputs)
        torch.manual_seed(99)
        return value

    plain, frugal = both(CASES["dropout"].build, "whole blocks", loss)
    assert_bit_equal(plain, frugal)
    assert torch.equal(frugal.random_states["torch"], torch.Generator().manual_seed(99).get_state())


def test_a_value_that_another_one_knows_is_never_taken_for_private():
    for _ in range(2000):  # code that ran often is specialised, and may count otherwise
        alone = Reference(object(), None)
        assert references_to_value(alone) <= ALONE
        other = alone.value
        assert references_to_value(alone) > ALONE
        del other
        held = [alone.value]
        assert references_to_value(alone) > ALONE
        del held
