"""A loop in nanoGPT's style: the model returns `(logits, loss)`, the loop accumulates gradients over micro-batches."""

import torch
from torch import nn
from torch.nn import functional as F

import tightfit

VOCABULARY, WIDTH, BATCH, LENGTH, ACCUMULATION = 64, 32, 4, 64, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.attention(self.ln_1(x)).chunk(3, 2))
        x = x + self.projection(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.lm_head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(size):
    return torch.randint(VOCABULARY, (2, size, LENGTH)).unbind()


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plan = tightfit.plan(  # for a whole step: one batch of all its micro-batches
    model, get_batch(BATCH * ACCUMULATION), "0.6x", optimizer=optimizer, micro_batches=ACCUMULATION, grad_clip=1.0
)
plan.apply(model)
with tightfit.monitor(model, optimizer) as watch:
    for _ in range(4):
        for _ in range(ACCUMULATION):
            loss = model(*get_batch(BATCH))[1] / ACCUMULATION  # a name would keep the logits in memory
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print("loss", loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
