"""Guests in DistributedDataParallel, run by torchrun: each without a budget and with one.

    torchrun --nproc-per-node 2 joined_guests.py GUEST FOLDER

Each rank writes a line of JSON: whether losses and weights are those of the training without a plan, and its peaks.
"""

import json
import logging
import sys

import torch
import torch.distributed as dist
from tiny_trainings import StepPeak, arguments, llama, losses, padded, samples
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Warnings(logging.Handler):
    """What this rank says."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def of_trainer(folder, budget, *, splits):
    from tiny_trainings import PeakOfSteps
    from transformers import Trainer

    from tightfit.integrations.hf import FrugalTrainer

    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "ddp_find_unused_parameters": not splits}
    peaks = PeakOfSteps(3, STEPS)
    memory = {} if budget is None else {"memory_budget": budget, "memory_levers": "rounding" if splits else None}
    kind = Trainer if budget is None else FrugalTrainer
    trainer = kind(
        model=llama(), args=arguments(folder, **settings), train_dataset=samples(), data_collator=padded,
        callbacks=[peaks], **memory,
    )  # fmt: skip
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return trainer.model, losses(trainer), getattr(trainer, "memory_plan", None), peaks.bytes


def of_accelerate(folder, budget):
    import accelerate

    from tightfit.integrations.accelerate import apply_budget

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples(160), batch_size=8, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, DistributedDataParallel)
    longest = sorted(samples(160), key=lambda row: len(row["input_ids"]))[-8:]
    batch = padded(longest)
    applied = None if budget is None else apply_budget(accelerator, model, optimizer, batch, budget, grad_clip=1.0)
    found, measured, highest = [], StepPeak(model, optimizer.optimizer), 0
    for index, batch in zip(range(2 * STEPS), loader, strict=False):
        if index % 2 == 0 and index > 3:
            measured.begin()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
        del loss
        if index % 2 == 1 and index > 3:
            highest = max(highest, measured.end())
    return model.module, found, applied and applied.plan, highest


def trained(guest, folder, budget):
    if guest == "accelerate":
        return of_accelerate(folder, budget)
    if guest == "lightning":
        from joined_lightning import of_lightning

        return of_lightning(folder, budget, STEPS)
    return of_trainer(folder, budget, splits=guest == "splitting")


def main(guest, folder):
    said = Warnings()
    logging.getLogger("tightfit").addHandler(said)
    plain, expected, _, plain_peak = trained(guest, folder, None)
    model, found, plan, peak = trained(guest, folder, "0.7x")
    pairs = list(zip(weights(plain), weights(model), strict=True))
    buckets = sum(p.nbytes for p in weights(model))  # which DDP holds where no Python code sees them
    row = {
        "rank": dist.get_rank(),
        "equal": found == expected and all(torch.equal(*pair) for pair in pairs),
        "close": all(torch.allclose(*pair, atol=1e-4) for pair in pairs),
        "hash": plan.hash, "ranks": [plan.world_size, plan.parallel], "levers": [lever.name for lever in plan.levers],
        "plain": plain_peak + buckets, "plain_predicted": plan.plain_peak_bytes,
        "measured": peak + buckets, "predicted": plan.peak_bytes, "budget": plan.budget_bytes, "warnings": said.lines,
    }  # fmt: skip
    print(json.dumps(row) + "\n", end="", flush=True)


def weights(model: nn.Module):
    return [p.detach() for p in model.parameters()]


if __name__ == "__main__":
    main(*sys.argv[1:])
