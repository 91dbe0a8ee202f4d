"""What a user gives to a public function is what the planner is asked, argument by argument."""

import inspect
from dataclasses import fields, replace

import pytest

import tightfit
from tightfit.devices.present import lookup
from tightfit.errors import BudgetError, InputError, LeverError
from tightfit.planner.api import estimate_asked
from tightfit.planner.request import Request
from tightfit.step import Step
from tiny import decoder, token_batch

OF_THE_STEP = {"model", "batch", "loss", "optimizer", "precision", "device", "micro_batches", "grad_clip"}
BESIDE = {"budget", "curve", "points", "error_or_trace"}  # what is asked of the step, not the step
FUNCTIONS = (tightfit.estimate, tightfit.plan, tightfit.curve, tightfit.diagnose)


class Reached(Exception):
    """The request that a function made of its arguments."""

    def __init__(self, request):
        self.request = request


def reached(monkeypatch, function, given):
    def checked(request, **_):
        raise Reached(request)

    monkeypatch.setattr(Request, "checked", checked)
    # An estimate is of the step without levers, which is not the subject here.
    monkeypatch.setattr(Request, "without_levers", lambda request: request)
    with pytest.raises(Reached) as caught:
        function(**given)
    request = caught.value.request
    return {"model": request.step.model, "batch": request.step.batch, **request.how}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_argument_arrives_under_its_own_name(function, monkeypatch):
    parameters = inspect.signature(function).parameters
    given = {name: object() for name in parameters if name not in BESIDE}
    beside = {"budget": "1x", "error_or_trace": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")}
    arrived = reached(monkeypatch, function, {**given, **{n: v for n, v in beside.items() if n in parameters}})
    assert given.keys() >= OF_THE_STEP
    assert {name: arrived[name] for name in given} == given


def test_what_is_left_out_is_the_same_everywhere():
    request = Request(Step(decoder(), token_batch()))
    for function in FUNCTIONS:
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in BESIDE | {"model", "batch"}:
                assert parameter.default == request.how[name], f"{function.__name__}({name})"


def test_a_plan_takes_every_argument_that_a_step_has():
    found = {"model", "batch", *Request(Step(decoder(), token_batch())).how}
    assert found == set(inspect.signature(tightfit.plan).parameters) - BESIDE
    assert {field.name for field in fields(Step)} <= found


@pytest.mark.slow  # four plans
def test_a_step_stands_in_the_place_of_its_arguments():
    model, batch = decoder(), token_batch()
    step = Step(model, batch, device="rtx4090", grad_clip=1.0)
    assert tightfit.estimate(step) == tightfit.estimate(model, batch, device="rtx4090", grad_clip=1.0)
    given, as_keywords = (
        {name: value for name, value in made.to_dict().items() if not name.startswith("host")}  # of this process
        for made in (
            tightfit.plan(step, "0.8x", levers=["recompute"]),
            tightfit.plan(model, batch, "0.8x", device="rtx4090", grad_clip=1.0, levers=["recompute"]),
        )
    )
    assert given == as_keywords
    assert tightfit.plan(step, budget="1x").choices == tightfit.plan(model, batch, "1x", device="rtx4090").choices


def test_a_step_and_an_argument_of_it_are_not_both_given():
    step = Step(decoder(), token_batch(), device="rtx4090")
    with pytest.raises(InputError, match="precision is given beside a Step, which has it: set it in the Step"):
        tightfit.estimate(step, precision="bf16")
    with pytest.raises(InputError, match="batch is given beside a Step"):
        tightfit.estimate(step, token_batch())
    with pytest.raises(BudgetError, match="budget None is not an amount of memory"):
        tightfit.plan(step)


def test_only_a_plan_chooses_the_micro_batches():
    asked = Request.of(decoder(), token_batch(), micro_batches="auto")
    with pytest.raises(InputError, match="micro_batches is 'auto', wanted an integer of at least 1"):
        asked.checked()
    request = asked.checked(may_choose=True)
    assert (request.micro_batches, request.fewest_micro_batches) == (1, True)
    assert "micro_batch" in request.levers


def test_a_lever_that_the_device_refuses_is_no_matter_to_an_estimate():
    device = replace(lookup("rtx4090"), captured_seconds=None)  # of a calibration before captured blocks
    asked = Request.of(decoder(num_layers=1), token_batch(), device=device, levers=["capture"])
    with pytest.raises(LeverError, match="capture is not available"):
        asked.checked()
    assert estimate_asked(asked) == tightfit.estimate(asked.model, asked.batch, device=device)
