"""A custom loss, here contrastive between two views of each text. The plan and the loop call one function."""

import torch
from torch import nn
from torch.nn import functional as F

import tightfit

VOCABULARY, WIDTH, PAIRS, LENGTH = 64, 32, 16, 48


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.normalize(hidden.mean(1), dim=-1)


def contrastive_loss(model, batch, temperature=0.1):
    """Brings each text's two views nearer than those of other texts. It calls the model twice."""
    left, right = model(batch["left"]), model(batch["right"])
    similarity = left @ right.T / temperature
    return F.cross_entropy(similarity, torch.arange(len(similarity)))


def batches(count):
    for _ in range(count):
        left = torch.randint(VOCABULARY, (PAIRS, LENGTH))
        right = torch.where(torch.rand(left.shape) < 0.2, torch.randint_like(left, VOCABULARY), left)
        yield {"left": left, "right": right}


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plan = tightfit.plan(model, next(batches(1)), "0.5x", loss=contrastive_loss, optimizer=optimizer)
plan.apply(model)
with tightfit.monitor(model, optimizer) as watch:
    for batch in batches(20):
        loss = contrastive_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
