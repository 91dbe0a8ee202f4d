"""Lightning with `strategy="ddp"`, for `joined_guests.py`."""

import pytorch_lightning
import torch
from tiny_trainings import StepPeak, llama, padded, samples

from tightfit.integrations.lightning import MemoryBudget


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.found = llama(), []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.found.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peaks(pytorch_lightning.Callback):
    """The peak of the later batches."""

    bytes = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx > 3 and batch_idx % 2 == 0:
            # Lightning drops the last step's gradients within its step, and a profile sees no free of older memory.
            pl_module.zero_grad(set_to_none=True)
            self.measured = StepPeak(pl_module, trainer.optimizers[0])
            self.measured.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx > 3 and batch_idx % 2 == 1:
            self.bytes = max(self.bytes, self.measured.end())


def of_lightning(folder, budget, steps):
    memory = [] if budget is None else [MemoryBudget(budget, max_length=64)]
    peaks = Peaks()
    trainer = pytorch_lightning.Trainer(
        max_steps=steps, accumulate_grad_batches=2, strategy="ddp", accelerator="cpu", devices=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[*memory, peaks],
    )  # fmt: skip
    model = Model()
    loader = torch.utils.data.DataLoader(samples(), batch_size=8, collate_fn=padded)
    trainer.fit(model, loader)
    return model, model.found, memory[0].plan if memory else None, peaks.bytes
