"""A training loop of your own within a memory budget: plan for one batch, apply the plan, and train as before."""

import torch
from torch import nn

import tightfit

VOCABULARY, WIDTH, BATCH, LENGTH = 64, 32, 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.mix(self.norm(x).mT)[..., :LENGTH].mT  # each position sees the three before it
        return x + self.down(nn.functional.gelu(self.up(x)))


def batches(count):
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*[Block() for _ in range(6)]), nn.Linear(WIDTH, VOCABULARY)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# The three lines.
plan = tightfit.plan(model, next(batches(1)), "0.5x", loss=loss_of, optimizer=optimizer)
print(plan)
plan.apply(model)

with tightfit.monitor(model, optimizer) as watch:  # to measure the peak beside the budget
    for batch in batches(20):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
