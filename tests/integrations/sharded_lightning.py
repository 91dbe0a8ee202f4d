"""Lightning with `ModelParallelStrategy` and FSDP2, for `sharded_guests.py`."""

import pytorch_lightning
from joined_lightning import Model
from pytorch_lightning.strategies import ModelParallelStrategy
from sharded_guests import STEPS, Peaks, longest
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tightfit.integrations.lightning import MemoryBudget


class Sharded(Model):
    """A model whose blocks are sharded one by one, and its rest together."""

    def __init__(self, policy=None):
        super().__init__()
        self.policy = MixedPrecisionPolicy() if policy is None else policy

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if mesh.size() == 1:
            for layer in self.model.model.layers:
                parallelize_module(layer.mlp, self.device_mesh["tensor_parallel"], {"up_proj": ColwiseParallel()})
            return
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=self.policy)
        fully_shard(self.model, mesh=mesh, mp_policy=self.policy)


class OfSteps(pytorch_lightning.Callback):
    def __init__(self, peaks, accumulated):
        self.peaks, self.accumulated = peaks, accumulated

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % self.accumulated == 0:
            self.peaks.begin()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % self.accumulated == self.accumulated - 1:
            self.peaks.end()


def of_lightning(budget, *, accumulated=2, policy=None, lengths=(64,), ranks_of_tensors=1, memory=None):
    memory = [] if budget is None else [MemoryBudget(budget, **(memory or {}))]
    trainer = pytorch_lightning.Trainer(
        max_steps=STEPS, accumulate_grad_batches=accumulated, accelerator="cpu", devices=2, logger=False,
        strategy=ModelParallelStrategy(2 // ranks_of_tensors, ranks_of_tensors), callbacks=[*memory],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    peaks = Peaks()
    trainer.callbacks.append(OfSteps(peaks, accumulated))
    model = Sharded(policy)
    trainer.fit(model, Repeated(accumulated * STEPS, lengths))
    return model, model.found, memory[0].plan if memory else None, peaks.bytes


class Repeated:
    """So many batches of the longest samples of this rank, by turns, the later ones of the last of some lengths."""

    def __init__(self, count, lengths):
        self.count, self.lengths = count, lengths

    def __len__(self):
        return self.count

    def __iter__(self):
        batches = longest(self.lengths[0])
        for number in range(self.count):
            if number == 4:
                batches = longest(self.lengths[-1])
            yield batches[number % 2]
