"""Guests whose model FSDP2 has sharded, run by torchrun with the counter of `benchmarks/allocations.c` preloaded.

    torchrun --nproc-per-node 2 sharded_guests.py GUEST BUDGET

Each rank writes a line of JSON: the losses and a digest of the weights, the plan, and the peak of a step as the
allocator counted it. BUDGET is "none" for the training without one.

Accelerate turns FSDP on for cards only. So the scripts tell it that there are several, after it has chosen gloo and the
CPU: all that follows is its own code.
"""

import gc
import hashlib
import importlib.util
import json
import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from joined_guests import Warnings
from tiny_trainings import arguments, llama, losses, padded, samples
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

STEPS, WARM = 8, 3
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Peaks:
    """The peaks of steps: the least of the later ones, since gloo frees some copies late. Made before the model."""

    def __init__(self):
        sys.path.insert(0, str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("ranks_benchmark", BENCHMARKS / "ranks.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        self.counts, self.found = module.Counts(), []
        gc.collect()
        self.before = self.counts.live

    def begin(self):
        if len(self.found) == 1:
            gc.collect()  # the first imports of parts of PyTorch leave cycles
            gc.disable()
        dist.barrier()
        time.sleep(0.1)
        self.counts.reset()

    def end(self):
        self.found.append(self.counts.peak - self.before)

    @property
    def bytes(self):
        return min(self.found[WARM:])


def longest(length=64):
    """Two batches of this rank, padded to the longest sample: one for each half of an update."""
    first = 20 * dist.get_rank()
    rows = [{"input_ids": row["input_ids"][:length]} for row in samples(160)]
    return [padded([rows[80], *rows[start : start + 7]]) for start in (first, first + 7)]


def plugin(**settings):
    from accelerate.utils import FullyShardedDataParallelPlugin

    chosen = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False}
    return FullyShardedDataParallelPlugin(**{**chosen, **settings})


def as_if_on_cards():
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def of_accelerate(budget, *, levers=None, mixed=None, accumulated=2, clip=1.0, tied=False, vocabulary=301, **settings):
    import accelerate

    from tightfit.integrations.accelerate import apply_budget

    as_if_on_cards()
    accelerator = accelerate.Accelerator(
        fsdp_plugin=plugin(**settings), gradient_accumulation_steps=accumulated, mixed_precision=mixed
    )
    peaks = Peaks()
    model = llama(vocab_size=vocabulary, tie_word_embeddings=tied)  # rows that do not divide
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = longest()[:accumulated]
    applied = None
    if budget is not None:
        applied = apply_budget(accelerator, model, optimizer, batches[0], budget, grad_clip=clip, levers=levers)
    found = []
    for _ in range(STEPS):
        peaks.begin()
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
            del loss
        peaks.end()
    return model, found, applied and applied.plan, peaks.bytes


def of_trainer(budget, *, frugal=False, bf16=False, memory=None, **config):
    from transformers import Trainer, TrainerCallback

    from tightfit.integrations.hf import FrugalTrainer, MemoryBudget

    class OfSteps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            peaks.begin()

        def on_step_end(self, args, state, control, **kwargs):
            peaks.end()

    as_if_on_cards()
    chosen = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False, **config}
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "bf16": bf16}
    args = arguments("unused", fsdp=True, fsdp_config=chosen, **settings)
    as_if_on_cards()
    peaks = Peaks()
    kind, own, callbacks = Trainer, {}, [OfSteps()]
    memory = None if budget is None else MemoryBudget(budget, **(memory or {}))
    if memory is not None and frugal:
        kind, own = FrugalTrainer, {"memory_budget": budget}
    elif memory is not None:
        callbacks.append(memory)
    trainer = kind(
        model=llama(vocab_size=301),
        args=args,
        train_dataset=[row for row in samples(600, 63, 65) if len(row["input_ids"]) < 65],
        data_collator=padded,
        callbacks=callbacks,
        **own,
    )
    trainer.train()
    plan = getattr(trainer, "memory_plan", None) if memory is None or frugal else memory.plan
    return trainer.model_wrapped, losses(trainer), plan, peaks.bytes


def of_lightning(budget, **settings):
    from sharded_lightning import of_lightning

    return of_lightning(budget, **settings)


GUESTS = {
    "trainer": of_trainer,
    "frugal trainer": lambda budget: of_trainer(budget, frugal=True, bf16=True),
    "accelerate": of_accelerate,
    "keeping": lambda budget: of_accelerate(budget, reshard_after_forward=False, accumulated=1, clip=None),
    "mixed": lambda budget: of_accelerate(budget, mixed="bf16", accumulated=1),
    "tied": lambda budget: of_accelerate(budget, tied=True, accumulated=1, clip=None),
    "rounding": lambda budget: of_accelerate(budget, levers=["chunked_loss"], accumulated=1, vocabulary=3001),
    "lightning": of_lightning,
    "mixed lightning": lambda budget: of_lightning(budget, policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "growing lightning": lambda budget: of_lightning(budget, lengths=(48, 64)),
    # Refused
    "tensor lightning": lambda budget: of_lightning(budget, ranks_of_tensors=2),
    "recovering lightning": lambda budget: of_lightning(budget, memory={"recover": True}),
    "on the host": lambda budget: of_accelerate(budget, cpu_offload=CPUOffloadPolicy(pin_memory=False)),
    "recovering": lambda budget: of_trainer(budget, memory={"recover": True}),
    "verifying": lambda budget: of_trainer(budget, memory={"verify": True}),
}


def main(guest, budget):
    said = Warnings()
    logging.getLogger("tightfit").addHandler(said)
    model, found, plan, peak = GUESTS[guest](None if budget == "none" else budget)
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    row = {"rank": dist.get_rank(), "losses": found, "weights": digest(model), "measured": peak, "units": units}
    row["warnings"] = said.lines
    if plan is not None:
        row |= {
            "hash": plan.hash, "ranks": [plan.world_size, plan.parallel], "levers": [each.name for each in plan.levers],
            "plain": plan.plain_peak_bytes, "predicted": plan.rank_peak_bytes[dist.get_rank()],
            "budget": plan.budget_bytes, "frees": plan.reshard_after_forward,
        }  # fmt: skip
    print(json.dumps(row) + "\n", end="", flush=True)
    dist.barrier()  # none closes connections that another one still uses
    dist.destroy_process_group()


def digest(model: nn.Module) -> str:
    """A checksum of whole weights, bit for bit."""
    made = hashlib.sha256()
    for parameter in model.parameters():
        made.update(parameter.full_tensor().detach().contiguous().numpy().tobytes())
    return made.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
