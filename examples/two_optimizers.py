"""Two models and two optimizers, as in a GAN. One function runs both turns, and one plan covers both models."""

import torch
from torch import nn
from torch.nn import functional as F

import tightfit

WIDTH, BATCH = 64, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def critic_loss(pair, batch):
    with torch.no_grad():
        fake = pair["generator"](batch["noise"])
    return F.softplus(-pair["critic"](batch["real"])).mean() + F.softplus(pair["critic"](fake)).mean()


def generator_loss(pair, batch):
    return F.softplus(-pair["critic"](pair["generator"](batch["noise"]))).mean()


def both_turns(pair, batch):
    """Runs one batch of the loop below: the critic's backward, then the generator's loss."""
    critic_loss(pair, batch).backward()
    return generator_loss(pair, batch)


def batches(count):
    for _ in range(count):
        yield {"noise": torch.randn(BATCH, WIDTH), "real": torch.randn(BATCH, WIDTH).cumsum(1)}


torch.manual_seed(0)
blocks = [nn.Sequential(*[Block() for _ in range(4)]) for _ in range(2)]
pair = nn.ModuleDict({"generator": blocks[0], "critic": nn.Sequential(blocks[1], nn.Linear(WIDTH, 1))})
optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in pair.items()}
plan = tightfit.plan(pair, next(batches(1)), "0.8x", loss=both_turns, optimizer="adamw")
plan.apply(pair)
with tightfit.monitor(pair, optimizers["generator"]) as watch:
    watch.add_optimizer(optimizers["critic"])
    for batch in batches(4):
        for name, loss_of in (("critic", critic_loss), ("generator", generator_loss)):
            loss = loss_of(pair, batch)
            loss.backward()
            optimizers[name].step()
            pair.zero_grad()
            print(name, loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
