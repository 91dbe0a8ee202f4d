"""A loop by hand with Accelerate, within a budget."""

import accelerate
import torch
from tiny_trainings import StepPeak, llama, padded, samples

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


def test_at_half_the_plain_peak_the_losses_are_identical_and_the_peak_is_within_the_budget():
    plain, _, _ = run()
    within, plan, peak = run("0.5x")
    assert within == plain
    assert len(plain) == 20
    assert plan.micro_batches == 2
    assert peak <= plan.budget_bytes == plan.plain_peak_bytes // 2
