"""Recompute is bit-equal to the plain run on every trap we know, whatever the policy keeps.

PyTorch's own checkpoint and selective checkpoint run beside it: a trap that catches nobody proves nothing.
"""

import functools
import importlib
import warnings

import pytest
import torch
from trap_cases import CASES
from trap_levers import LEVERS, TORCH_LEVERS

from exactness import Outcome, assert_bit_equal, differences, run

for cases in ("trap_state", "trap_memory", "trap_modules"):
    importlib.import_module(cases)  # registers its blocks


def step(name, levers=None) -> Outcome:
    case = CASES[name]
    return run(*case.build(), case.loss, backward=case.backward, levers=levers)


@functools.cache
def plain_step(name) -> Outcome:
    return step(name)


def verdict(name, plain, levers) -> str:
    """What somebody else's lever does with a trap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = differences(plain, step(name, levers))
        except Exception as error:
            return f"raises {type(error).__name__}"
    return f"silently wrong: {found[0]}" if found else "bit-equal"


@pytest.mark.sampled(27)
@pytest.mark.parametrize("name", CASES)
def test_the_plain_step_of_a_trap_is_repeatable(name):
    assert_bit_equal(plain_step(name), step(name))


@pytest.mark.keeps("recompute-leaves-loss-gradients")
@pytest.mark.sampled(60)
@pytest.mark.parametrize("lever", LEVERS)
@pytest.mark.parametrize("name", CASES)
def test_recompute_leaves_everything_bit_equal(name, lever):
    assert_bit_equal(plain_step(name), step(name, LEVERS[lever]))


@pytest.mark.slow  # shows others wrong, not us right: twenty seconds
@pytest.mark.parametrize("lever", TORCH_LEVERS)
def test_the_traps_are_traps_pytorchs_own_checkpoint_gets_some_of_them_wrong(lever, record_property):
    """Which ones may change from release to release: the verdicts are recorded with the test."""
    verdicts = {name: verdict(name, plain_step(name), TORCH_LEVERS[lever]) for name in CASES}
    for name, said in verdicts.items():
        record_property(name, said)
    assert any(said.startswith("silently wrong") for said in verdicts.values())
    assert "bit-equal" in verdicts.values()


def test_the_comparison_sees_a_single_wrong_bit():
    plain, frugal = step("dropout"), step("dropout")
    name, gradient = next(iter(frugal.gradients.items()))
    gradient.view(torch.int32)[0] ^= 1
    with pytest.raises(AssertionError, match=name.replace(".", r"\.")):
        assert_bit_equal(plain, frugal)
