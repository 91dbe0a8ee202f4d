"""Offload is bit-equal to the plain run on every trap that recompute is tried with."""

import functools
import importlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_recompute_programs import lines
from test_recompute_programs import step as program_step
from test_recompute_steps import SMOOTH, backward_twice, gradient_penalty, three_micro_batches, two_graphs_at_once
from trap_cases import CASES
from trap_offloads import WAYS, thirds

from exactness import assert_bit_equal, run

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks


def step(name, levers=None):
    case = CASES[name]
    return run(*case.build(), case.loss, backward=case.backward, levers=levers)


@functools.cache
def plain_step(name):
    return step(name)


@pytest.mark.keeps("peak-plan-offload-equals")
@pytest.mark.sampled(48)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_offload_leaves_everything_bit_equal(name, way):
    assert_bit_equal(plain_step(name), step(name, WAYS[way]))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("loss", [gradient_penalty, three_micro_batches, two_graphs_at_once])
def test_offload_over_several_graphs_is_bit_equal(name, way, loss):
    build = CASES["a plain MLP" if "attention" in name or "Encoder" in name else name].build
    assert_bit_equal(run(*build(), loss), run(*build(), loss, levers=WAYS[way]))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMOOTH)
def test_a_second_backward_over_a_retained_graph_is_bit_equal(name, way):
    case = CASES[name]
    plain = run(*case.build(), case.loss, backward=backward_twice)
    assert_bit_equal(plain, run(*case.build(), case.loss, backward=backward_twice, levers=WAYS[way]))


@settings(max_examples=60, deadline=None)
@given(lines, st.integers(0, 9), st.sampled_from([*WAYS, "a third of the operators"]))
@example([("sin", 0, 0), ("sin", 1, 0), ("data_", 0, 0)], 0, "no room for any")
def test_offload_of_a_random_program_is_bit_equal(program, seed, way):
    try:
        plain = program_step(program)
    except RuntimeError:
        return  # autograd itself refuses the program: a value that it needs was overwritten
    levers = WAYS.get(way) or functools.partial(thirds, seed, False)
    assert_bit_equal(plain, program_step(program, levers))


@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_writes_into_the_result_of_another_through_data_is_bit_equal(way):
    name = "writes into another block's result through .data"
    assert_bit_equal(plain_step(name), step(name, WAYS[way]))
