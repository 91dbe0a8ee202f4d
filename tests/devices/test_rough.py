"""Rough figures of a CPU that was not measured yet."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tightfit.devices import rough as module
from tightfit.devices.cost import CostModel
from tightfit.devices.rough import reference, rough, scaled
from tightfit.devices.spec import DeviceSpec
from tightfit.tracing.shapes import TensorShape

CALLS = ("float32", "bfloat16", "memory", "elements", "host")
STEP_TIME = Path(__file__).parents[2] / "benchmarks" / "results" / "step_time.json"


def _seconds(**factors: float) -> dict[str, float]:
    """The seconds of the quick calls on the reference itself, times a factor for each."""
    return {name: factors.get(name, 1.0) * module._seconds_of(name, reference()) for name in CALLS}


def _price(spec: DeviceSpec, name: str, *tensors: torch.Tensor) -> float:
    shapes = [TensorShape(tuple(t.shape), t.stride(), t.dtype) for t in tensors]
    return CostModel(replace(spec, in_steps={})).operator_seconds(name, shapes[:-1], shapes[-1:])


def test_the_reference_is_the_cpu_that_the_benchmark_calibrated():
    assert reference() == DeviceSpec.from_dict(json.loads(STEP_TIME.read_text())["device"])


def test_a_cpu_that_is_as_fast_has_the_same_figures():
    known = reference()
    same = scaled(known, _seconds())
    assert same == replace(
        known,
        name=same.name,
        memory_bytes=same.memory_bytes,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        scaled_from=same.scaled_from,
    )
    assert known.name in same.scaled_from


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_follow_the_product_of_their_dtype(dtype):
    kind = str(dtype).removeprefix("torch.")
    a = torch.empty(1024, 1024, dtype=dtype, device="meta")
    slow = scaled(reference(), _seconds(**{kind: 3.0}))
    assert _price(slow, "aten.mm.default", a, a, a) == pytest.approx(
        3 * _price(reference(), "aten.mm.default", a, a, a), rel=0.05
    )
    other = scaled(reference(), _seconds(memory=3.0, elements=3.0))
    assert _price(other, "aten.mm.default", a, a, a) == _price(reference(), "aten.mm.default", a, a, a)


@pytest.mark.parametrize(("name", "kind"), [("aten.add.Tensor", "memory"), ("aten.exp.default", "elements")])
def test_other_operators_follow_the_call_of_their_kind(name, kind):
    a = torch.empty(2**20, device="meta")
    slow = scaled(reference(), _seconds(**{kind: 2.0}))
    of_framework = reference().framework_seconds
    assert _price(slow, name, a, a) - of_framework == pytest.approx(
        2 * (_price(reference(), name, a, a) - of_framework)
    )


def test_the_hosts_time_follows_an_operator_without_work():
    slow, known = scaled(reference(), _seconds(host=2.0)), reference()
    for name in ("framework_seconds", "recording_seconds", "replaying_seconds", "captured_seconds"):
        assert getattr(slow, name) == pytest.approx(2 * getattr(known, name))


def test_the_present_cpu_has_figures_for_all_that_the_reference_has():
    state = torch.random.get_rng_state()
    found, known = rough("cpu"), reference()
    assert torch.equal(torch.random.get_rng_state(), state)
    for table in ("products", "attention", "streams"):
        assert getattr(found, table).keys() == getattr(known, table).keys()
    assert DeviceSpec.from_dict(found.to_dict()) == found  # every figure is finite and none is negative
    assert found.seconds_are_rough
