"""Stream is bit-equal to the plain run on every trap that recompute is tried with."""

import functools
import importlib

import pytest
from test_recompute_steps import (
    backward_twice,
    gradient_penalty,
    three_micro_batches,
    two_graphs_at_once,
    with_passes_in_between,
)
from trap_cases import CASES
from trap_streams import STREAMS, freeze, has_frozen

from exactness import assert_bit_equal, run
from tightfit.levers.recompute.lever import matching_modules
from tightfit.levers.stream import lever

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks

LOSSES = [gradient_penalty, three_micro_batches, two_graphs_at_once, with_passes_in_between]


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    """The weights of these blocks are small."""
    monkeypatch.setattr(lever, "SMALLEST_BYTES", 1)


def build(name):
    model, inputs = CASES[name].build()
    return freeze(model), inputs


def step(name, levers=None, times=1):
    case = CASES[name]
    return run(*build(name), case.loss, backward=case.backward, levers=levers, times=times)


@functools.cache
def plain_step(name):
    return step(name)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("way", STREAMS)
@pytest.mark.parametrize("name", CASES)
def test_stream_leaves_everything_bit_equal(name, way):
    if not has_frozen(build(name)[0]):
        pytest.skip("the blocks have no frozen weights of their own")
    assert_bit_equal(plain_step(name), step(name, STREAMS[way]))


@pytest.mark.keeps("streamed-trained-bits")
@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_streamed_trained_weights_leave_everything_bit_equal(name):
    model, _ = CASES[name].build()
    if not all(lever.streamable_weights(model, matching_modules(model, "layers.*"), trained=True)):
        pytest.skip("the blocks have no weights of their own")
    case = CASES[name]
    levers = functools.partial(lever.stream, pattern="layers.*", trained=True)
    plain, streamed = (run(*case.build(), case.loss, backward=case.backward, levers=each) for each in (None, levers))
    assert_bit_equal(plain, streamed)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", STREAMS)
@pytest.mark.parametrize("name", ["a plain MLP", "dropout"])
@pytest.mark.parametrize("loss", LOSSES)
def test_stream_over_several_graphs_is_bit_equal(name, way, loss):
    assert_bit_equal(run(*build(name), loss), run(*build(name), loss, levers=STREAMS[way]))


@pytest.mark.parametrize("way", STREAMS)
def test_a_second_backward_over_a_retained_graph_is_bit_equal(way):
    plain = run(*build("dropout"), backward=backward_twice)
    assert_bit_equal(plain, run(*build("dropout"), backward=backward_twice, levers=STREAMS[way]))
