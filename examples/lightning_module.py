"""A transformer in a LightningModule: first within 70% of its plain peak, then with plain gradient checkpointing."""

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn

from tightfit.integrations.lightning import FrugalModule, MemoryBudget


class Classifier(FrugalModule, LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def training_step(self, batch):
        tokens, labels = batch
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden.mean(dim=1)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(model, **settings):
    samples = torch.utils.data.TensorDataset(torch.randint(100, (64, 64)), torch.randint(10, (64,)))
    loader = torch.utils.data.DataLoader(samples, batch_size=16)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, accelerator="cpu", **quiet, **settings).fit(model, loader)


budget = MemoryBudget("0.7x")  # or "22GiB", or "80%" of the device
fit(Classifier(), callbacks=[budget])
print(budget.plan)

model = Classifier()
model.gradient_checkpointing = True  # without a plan: every block recomputed
fit(model)
