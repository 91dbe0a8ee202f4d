"""A step joined of two traces is the step that is traced whole."""

from functools import partial

import bitsandbytes  # noqa: F401 - what it makes when it is imported is not the step's
import pytest

from made_up_devices import even
from tightfit.devices.present import lookup
from tightfit.models.variants import as_recipe
from tightfit.optim import step_in_backward
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.request import Request, Tracer
from tightfit.tracing.joined import joined
from tightfit.tracing.step import trace_part, trace_update
from tiny import decoder, token_batch

DEVICES = {"cpu": even, "card": partial(lookup, "rtx4090")}
OPTIMIZERS = [
    ("fp32", "adamw"),
    ("fp32", "adafactor"),
    ("fp32", "adamw8bit"),
    ("bf16", "flash_adamw"),
    ("fp32", "adamw4bit"),
]


def traces(dtype, optimizer, device, *, in_backward=False):
    """The whole step, and the step joined of its parts."""
    model = as_recipe(decoder(hidden_size=32, num_layers=2), dtype=dtype)

    def factory(parameters):
        made = build_optimizer(optimizer, list(parameters))
        return step_in_backward(made, model).optimizer if in_backward else made

    request = Request.of(model, token_batch(2, 32), optimizer=factory, device=DEVICES[device]()).checked()
    settings = {"settings": request.settings, "cost": request.cost, "role": request.role}
    whole = Tracer(request).whole(request.plain, {})
    part = trace_part(
        model, request.parts(1), request.loss, state_bytes=0, with_gradient=(), in_backward=in_backward, **settings
    )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    update = trace_update(model, optimizer, with_gradient=names, one_by_one=in_backward, **settings)
    return whole, joined(part, update, on_cuda=request.role is not None)


@pytest.mark.keeps("step-joined-trace-forward", "estimates-plans-state-seconds")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "optimizer"), OPTIMIZERS)
def test_every_level_of_a_joined_step_is_that_of_the_whole_one(dtype, optimizer, device):
    whole, found = traces(dtype, optimizer, device)
    assert found.levels == whole.levels
    assert found.reserved_bytes == whole.reserved_bytes
    assert found.step_seconds == pytest.approx(whole.step_seconds)
    assert found.host_seconds == pytest.approx(whole.host_seconds)
    assert found.device_seconds == pytest.approx(whole.device_seconds)
    assert found.by_category() == whole.by_category()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "optimizer"), OPTIMIZERS[1:])
def test_with_the_step_in_backward_the_peak_and_the_seconds_are_near_the_whole_ones(dtype, optimizer, device):
    whole, found = traces(dtype, optimizer, device, in_backward=True)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert found.host_seconds == pytest.approx(whole.host_seconds, rel=0.01)
    assert found.device_seconds == pytest.approx(whole.device_seconds, rel=0.01)
