"""What a user gives to a public function is what the planner is asked, argument by argument."""

import inspect
from dataclasses import fields

import pytest

import tightfit
from tightfit.errors import InputError, LeverError
from tightfit.planner.api import estimate_asked
from tightfit.planner.asked import Asked
from tiny import decoder, token_batch

OF_THE_STEP = {"model", "batch", "loss", "optimizer", "precision", "device", "micro_batches", "grad_clip"}
BESIDE = {"budget", "curve", "points", "error_or_trace"}  # what is asked of the step, not the step
FUNCTIONS = (tightfit.estimate, tightfit.plan, tightfit.curve, tightfit.diagnose)


class Reached(Exception):
    """The record that a function made of its arguments."""

    def __init__(self, asked):
        self.asked = asked


def reached(monkeypatch, function, given):
    def request(asked, **_):
        raise Reached(asked)

    monkeypatch.setattr(Asked, "request", request)
    with pytest.raises(Reached) as caught:
        function(**given)
    return caught.value.asked


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_argument_arrives_under_its_own_name(function, monkeypatch):
    parameters = inspect.signature(function).parameters
    given = {name: object() for name in parameters if name not in BESIDE}
    beside = {"budget": "1x", "error_or_trace": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")}
    asked = reached(monkeypatch, function, {**given, **{n: v for n, v in beside.items() if n in parameters}})
    assert given.keys() >= OF_THE_STEP
    assert {name: getattr(asked, name) for name in given} == given


def test_what_is_left_out_is_the_same_everywhere(monkeypatch):
    defaults = {field.name: field.default for field in fields(Asked)}
    for function in FUNCTIONS:
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in BESIDE | {"model", "batch"}:
                assert parameter.default == defaults[name], f"{function.__name__}({name})"


def test_a_plan_takes_every_argument_that_a_step_has():
    made = {"shards", "apart"}  # by a guest or a training of the model, not arguments
    found = {field.name for field in fields(Asked)} - made
    assert found == set(inspect.signature(tightfit.plan).parameters) - BESIDE


def test_only_a_plan_chooses_the_micro_batches():
    asked = Asked(decoder(), token_batch(), micro_batches="auto")
    with pytest.raises(InputError, match="micro_batches is 'auto', wanted an integer of at least 1"):
        asked.request()
    request = asked.request(may_choose=True)
    assert (request.micro_batches, request.fewest_micro_batches, asked.count) == (1, True, 1)
    assert "micro_batch" in request.levers


def test_a_lever_that_the_device_refuses_is_no_matter_to_an_estimate():
    asked = Asked(decoder(num_layers=1), token_batch(), device="rtx4090", levers=["compile"])
    with pytest.raises(LeverError, match="compile is not available"):
        asked.request()
    assert estimate_asked(asked) == tightfit.estimate(asked.model, asked.batch, device="rtx4090")
