"""Guests on several cards, run by torchrun: each rank writes a line of JSON with its plan and its measured peak.

    torchrun --nproc-per-node 2 guest_ranks.py GUEST ddp|fsdp2|hsdp|pairs

Values are true: what ranks send each other is read.
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from tiny_trainings import llama, padded, samples
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tightfit.devices.nullcard.values import true_values

STEPS, SAMPLES, LENGTH = 4, 16, 64
SIZES = {"hidden_size": 128, "intermediate_size": 256}


def batches():
    rows = [{"input_ids": row["input_ids"][:LENGTH]} for row in samples(SAMPLES * STEPS * 2, LENGTH, LENGTH + 1)]
    return [padded(rows[at : at + SAMPLES]) for at in range(0, len(rows), SAMPLES)]


def of_trainer(parallel):
    import transformers

    from tightfit.integrations.hf import FrugalTrainer

    wrapped = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False}
    args = transformers.TrainingArguments(
        "unused", max_steps=STEPS, per_device_train_batch_size=SAMPLES, bf16=True, report_to=[], save_strategy="no",
        disable_tqdm=True, ddp_find_unused_parameters=False,
        **({"fsdp": True, "fsdp_config": wrapped} if parallel == "fsdp2" else {}),
    )  # fmt: skip
    rows = samples(200, LENGTH, LENGTH + 1)
    trainer = FrugalTrainer(
        model=llama(**SIZES), args=args, train_dataset=rows, data_collator=padded, memory_budget="0.8x"
    )
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return trainer.model, trainer.memory_plan


def of_accelerate(parallel):
    import accelerate
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tightfit.integrations.accelerate import apply_budget

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    copied = {"parallelism_config": accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}
    accelerator = accelerate.Accelerator(
        fsdp_plugin=None if parallel == "ddp" else plugin,
        mixed_precision="bf16",
        **(copied if parallel == "hsdp" else {}),
    )
    model = llama(**SIZES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = [{name: value.to(accelerator.device) for name, value in batch.items()} for batch in batches()]
    applied = apply_budget(accelerator, model, optimizer, found[0], "0.8x", grad_clip=1.0)
    del found[1:]
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        accelerator.backward(model(**found[0]).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, applied.plan


def of_lightning(parallel):
    import pytorch_lightning
    from pytorch_lightning.strategies import ModelParallelStrategy

    from tightfit.integrations.lightning import MemoryBudget

    together = 2 if parallel == "pairs" else 1  # blocks in a unit
    is_sharded = parallel != "ddp"

    class Model(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama(**SIZES)

        def configure_model(self):
            if is_sharded:
                mesh = self.device_mesh["data_parallel"]
                layers = [*self.model.model.layers]
                for first in range(0, len(layers), together):
                    fully_shard(layers[first : first + together], mesh=mesh)
                fully_shard(self.model, mesh=mesh)

        def training_step(self, batch, batch_idx):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    memory = MemoryBudget("0.8x", **({} if is_sharded else {"max_length": LENGTH}))
    trainer = pytorch_lightning.Trainer(
        max_steps=STEPS, accelerator="cuda", devices=dist.get_world_size() if dist.is_initialized() else 2,
        logger=False, strategy=ModelParallelStrategy(2, 1) if is_sharded else "ddp", callbacks=[memory],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, precision="bf16-true" if is_sharded else "bf16-mixed",
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(samples(200, LENGTH, LENGTH + 1), batch_size=SAMPLES, collate_fn=padded)
    torch.cuda.reset_peak_memory_stats()
    model = Model()
    trainer.fit(model, loader)
    return model, memory.plan


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


GUESTS = {"trainer": of_trainer, "accelerate": of_accelerate, "lightning": of_lightning}


def wait_for_the_watchdog():
    """DDP makes its buckets anew before the second step. The first ones live until NCCL's watchdog has looked again,
    every 100 ms: longer than a step of a card that computes nothing."""
    before = DistributedDataParallel._pre_forward

    def forward(self, *inputs, **settings):
        if not self._has_rebuilt_buckets:
            time.sleep(0.3)
        return before(self, *inputs, **settings)

    DistributedDataParallel._pre_forward = forward


def main(guest, parallel):
    wait_for_the_watchdog()
    with true_values():
        model, plan = GUESTS[guest](parallel)
        norms = torch.stack([p.detach().float().norm() for p in map(whole, model.parameters())]).cuda()
        others = [torch.empty_like(norms) for _ in range(dist.get_world_size())]
        dist.all_gather(others, norms)
    rank = dist.get_rank()
    predicted = plan.rank_peak_bytes[rank] if plan.rank_peak_bytes else plan.peak_bytes
    row = {
        "rank": rank, "levers": [lever.name for lever in plan.levers], "ranks": [plan.world_size, plan.parallel],
        "budget": plan.budget_bytes, "predicted": predicted,
        "measured": torch.cuda.max_memory_allocated(), "equal": all(torch.equal(norms.cpu(), o.cpu()) for o in others),
    }  # fmt: skip
    print(json.dumps(row) + "\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
