"""A dry run predicts the peak of every kind of optimizer, and leaves the user's own one alone."""

import pytest
import torch
from small_training import assert_same_weights, net, train

from tightfit.levers.micro_batch import as_parts, split_batch
from tightfit.optim import OffloadedAdamW, flash, step_in_backward
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.api import estimate
from tightfit.step import model_loss
from tightfit.tracing.record import Category, Phase
from tightfit.tracing.step import trace_step
from tiny import allocator_peak, decoder, token_batch

TOLERANCE = 0.001
KINDS = [
    "adamw_fused",
    "muon",
    "muon8bit",
    "adafactor",
    "offloaded_adamw",
    "offloaded_adamw:0.5",
    "offloaded_adamw_fused",
]


def in_backward(parameters):
    return step_in_backward(torch.optim.AdamW, list(parameters)).optimizer


def in_backward_by_name(name):
    return lambda parameters: step_in_backward(lambda ps: build_optimizer(name, ps), list(parameters)).optimizer


def traced(model, batch, optimizer, micro_batches=1):
    parts = as_parts(split_batch(batch, micro_batches), model_loss)
    return trace_step(model, parts, model_loss, optimizer=optimizer)


@pytest.mark.keeps("optimizer-states-host-16")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", [*KINDS, in_backward])
def test_the_predicted_peak_is_the_allocators(optimizer, micro_batches):
    model, batch = decoder(num_layers=2), token_batch(2, 16)
    predicted = traced(model, batch, optimizer, micro_batches).peak_bytes
    measured = allocator_peak(model, batch, optimizer=optimizer, micro_batches=micro_batches)
    assert predicted == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.sampled(1)
@pytest.mark.keeps("optimizer-states-host-16")
@pytest.mark.parametrize(
    "optimizer", ["adamw_bf16", "adamw_bf16_stochastic", "flash_adamw", "muon8bit", "offloaded_adamw"]
)
def test_sixteen_bit_weights_are_predicted_too(optimizer):
    model, batch = decoder(num_layers=2).to(torch.bfloat16), token_batch(2, 16)
    predicted = traced(model, batch, optimizer).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, optimizer=optimizer), rel=TOLERANCE)


@pytest.mark.keeps("flash-adamw-takes-7")
@pytest.mark.parametrize("optimizer", ["flash_adamw", "flash_adamw in backward", "muon8bit"])
def test_a_weight_that_is_updated_in_chunks_is_predicted_too(optimizer, monkeypatch):
    monkeypatch.setattr(flash, "CHUNK", 1 << 13)  # several chunks, a shorter one, and numbers beyond the last group
    model = decoder(num_layers=1, hidden_size=36, num_heads=2).to(torch.bfloat16)
    name, _, stepping = optimizer.partition(" ")
    optimizer = in_backward_by_name(name) if stepping else name
    batch = token_batch(2, 16)
    # Not to the byte: an operator wraps a number in 12 bytes, and the processor's products decide where the peak is.
    predicted = traced(model, batch, optimizer).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, optimizer=optimizer), abs=16)


def test_a_step_in_chunks_costs_as_much_as_all_of_its_chunks(monkeypatch):
    model, batch = decoder(num_layers=1), token_batch(1, 8)

    def seconds(chunk):
        monkeypatch.setattr(flash, "CHUNK", chunk)
        found = trace_step(
            model,
            as_parts([batch], model_loss),
            model_loss,
            optimizer="flash_adamw",
            cost=lambda name, inputs, outputs, arguments: sum(shape.numel for shape in inputs),
        )
        return sum(o.seconds for o in found.operators if o.phase is Phase.OPTIMIZER)

    assert seconds(256) == pytest.approx(seconds(1 << 17), rel=1e-3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within PyTorch's compiler, which 4-bit states step with
@pytest.mark.parametrize("optimizer", ["adamw8bit", pytest.param("adamw4bit", marks=pytest.mark.slow)])  # compiles
def test_low_bit_states_are_predicted_too(optimizer):
    model, batch = decoder(num_layers=2), token_batch(2, 16)
    predicted = traced(model, batch, optimizer).peak_bytes
    assert predicted == pytest.approx(allocator_peak(model, batch, optimizer=optimizer), rel=TOLERANCE)


@pytest.mark.keeps("optimizer-states-host-16")
def test_on_a_card_offloaded_states_and_gradients_take_nothing():
    model, batch = decoder(num_layers=6), token_batch(1, 8)
    plain = estimate(model, batch, device="rtx4090")
    half = estimate(model, batch, device="rtx4090", optimizer="offloaded_adamw:0.5")
    all_of_it = estimate(model, batch, device="rtx4090", optimizer="offloaded_adamw")
    states = [found.by_category["optimizer states"] for found in (plain, half, all_of_it)]
    assert states[0] > states[1] > states[2] == 0
    assert all_of_it.by_category["gradients"] < plain.by_category["gradients"]
    assert all_of_it.peak_bytes < half.peak_bytes < plain.peak_bytes


def test_a_step_in_backward_takes_less_than_one_afterwards():
    model, batch = decoder(num_layers=6), token_batch(1, 8)
    plain, stepped = traced(model, batch, "adamw"), traced(model, batch, in_backward)
    gradients = sum(p.nbytes for p in model.parameters())
    assert plain.peak_bytes - stepped.peak_bytes > 0.5 * gradients
    assert stepped.by_category()[Category.OPTIMIZER_STATE] == plain.by_category()[Category.OPTIMIZER_STATE]


@pytest.mark.parametrize("kind", ["adamw", "offloaded_adamw:0.5"])
@pytest.mark.parametrize("stepping", [False, True])
def test_a_users_optimizer_is_predicted_and_keeps_still_meanwhile(kind, stepping):
    model, batch = decoder(num_layers=2), token_batch(2, 16)
    optimizer = build_optimizer(kind, model.parameters())
    if stepping:
        step_in_backward(optimizer, model)
    before = [p.detach().clone() for p in model.parameters()]
    by_optimizer = traced(model, batch, optimizer).peak_bytes
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert (by_optimizer < traced(model, batch, kind).peak_bytes) == stepping


def test_a_training_that_was_estimated_in_the_middle_goes_on_as_if_nothing_had_been():
    models = [net(), net()]
    optimizers = [OffloadedAdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, steps=3)
    ids = torch.ones(2, 3, dtype=torch.long)
    trace_step(models[0], as_parts([{"ids": ids}], _loss), _loss, optimizer=optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, steps=3, seed=1)
    assert_same_weights(*models)


def _loss(model, batch):
    return (model(**batch) ** 2).mean()
