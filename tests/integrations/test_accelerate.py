"""A loop by hand with Accelerate, within a budget."""

import accelerate
import pytest
import torch
from tiny_trainings import StepPeak, llama, padded, samples

from tightfit.errors import CannotFit, LeverError
from tightfit.integrations import planning
from tightfit.integrations.accelerate import apply_budget


def run(budget=None):
    """Ten updates of two accumulated batches each. Returns the losses, the plan, and the peak of the last update."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples(160), batch_size=8, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rows = sorted(samples(160), key=lambda row: len(row["input_ids"]))
    longest = padded([rows[-1], *rows[:7]])
    applied = None if budget is None else apply_budget(accelerator, model, optimizer, longest, budget, grad_clip=1.0)
    losses, measured = [], StepPeak(model, optimizer.optimizer)
    for index, batch in enumerate(loader):
        if index == 18:
            measured.begin()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    return losses, applied and applied.plan, measured.end()


@pytest.mark.keeps("half-plain-peak-twenty")
@pytest.mark.slow  # twenty steps twice
def test_at_half_the_plain_peak_the_losses_are_identical_and_the_peak_is_within_the_budget():
    plain, _, _ = run()
    within, plan, peak = run("0.5x")
    assert within == plain
    assert len(plain) == 20
    assert plan.micro_batches == 2
    assert peak <= plan.budget_bytes == plan.plain_peak_bytes // 2


def refused(model, error, said, budget="0.5x"):
    """The one line with which a budget is refused; the model stays as it was."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    before = [module.__dict__.get("forward") for module in model.modules()]
    with pytest.raises(error, match=said) as refusal:
        apply_budget(accelerator, model, optimizer, padded(samples(8)), budget)
    assert "\n" not in str(refusal.value)
    assert [module.__dict__.get("forward") for module in model.modules()] == before


@pytest.mark.slow  # the least is searched
def test_a_budget_below_the_least_is_one_line():
    refused(
        llama(), CannotFit, r"the least is .*; the plain step takes [0-9.]+ MiB, and 1MiB was asked for", budget="1MiB"
    )


@pytest.mark.slow  # a plan of a model of transformers
def test_a_device_that_is_measured_at_the_first_plan_is_said_so(monkeypatch, caplog):
    known = planning.lookup(None)

    def lookup(device, notice=None, *, measured=False):
        if measured:
            notice("measuring this CPU, once, in some seconds")
        return known

    monkeypatch.setattr(planning, "lookup", lookup)
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    apply_budget(accelerator, model, optimizer, padded(samples(8)), "2x").undo()
    assert caplog.messages.count("measuring this CPU, once, in some seconds") == 1


def test_a_model_without_repeated_blocks_is_told_so():
    model = llama(num_hidden_layers=1)
    model.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    model.config.num_hidden_layers = 0
    refused(model, CannotFit, "has no repeated block to recompute", budget="0.3x")


def test_a_compiled_model_is_one_line():
    refused(torch.compile(llama(), backend="eager"), LeverError, r"the model is compiled by torch\.compile")


def checkpointing():
    """A model with its own gradient checkpointing, ready to train, with its optimizer and accelerator."""
    accelerator, model = accelerate.Accelerator(cpu=True), llama()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the new name
    enable()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


@pytest.mark.keeps("tightfit-takes-user-own")
@pytest.mark.slow  # a plan and its loop
def test_the_users_own_checkpointing_is_taken_over_and_said_and_given_back(caplog):
    accelerator, model, optimizer = checkpointing()
    applied = apply_budget(accelerator, model, optimizer, padded(samples(8)), "0.6x")
    assert "gradient checkpointing is taken over" in caplog.text
    assert "; its peak was " in caplog.text
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    applied.undo()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.keeps("tightfit-takes-user-own")
@pytest.mark.slow  # a plan that is made and given up
def test_checkpointing_is_given_back_where_a_plan_cannot_be_applied(monkeypatch):
    def refused(*args):
        raise LeverError("no room to offload to")

    accelerator, model, optimizer = checkpointing()
    monkeypatch.setattr("tightfit.planner.plans.Plan.apply", refused)
    with pytest.raises(LeverError, match="no room"):
        apply_budget(accelerator, model, optimizer, padded(samples(8)), "0.6x")
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


@pytest.mark.slow  # a training of two plans
def test_called_again_the_new_plan_takes_the_place_of_the_first():
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    first = apply_budget(accelerator, model, optimizer, padded(samples(8)), "0.6x")
    second = apply_budget(accelerator, model, optimizer, padded(samples(8)), "0.7x")
    assert (first.in_force, second.in_force) == (False, True)
    second.undo()
    assert not any("forward" in module.__dict__ for module in model.model.layers)
