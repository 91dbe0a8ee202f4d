"""Three steps of a decoder on several cards, run by torchrun.

    torchrun --nproc-per-node 2 measured_ranks.py ddp|fsdp2|hsdp|tp|cp PRECISION [PLAN]

Each rank writes a line of JSON with its peaks.
"""

import gc
import json
import sys
import time

import torch
import torch.distributed as dist

from tightfit import Plan
from tightfit.levers.micro_batch import as_parts
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.blocks.find import find_blocks
from tightfit.ranks.context_parallel import in_context_parallel
from tightfit.ranks.tensor_parallel import in_tensor_parallel
from tightfit.ranks.world import World
from tightfit.ranks.wrapping import in_ddp, in_fsdp2, mesh_of
from tightfit.step import StepSettings, forward_backward, model_loss, update
from tiny import decoder, token_batch

NODES = 2  # of HSDP
ROWS, LENGTH, SHAPE = 8, 256, {"num_layers": 4, "hidden_size": 256, "vocab_size": 2000}


def wrapped(model, parallel, precision, plan):
    if plan is not None:
        plan.apply(model)
    if parallel == "ddp":
        return in_ddp(model)
    mesh = mesh_of(World(dist.get_world_size(), parallel, NODES if parallel == "hsdp" else 1), "cuda")
    if plan is not None:
        return plan.shard(model, mesh)
    if parallel == "tp":
        return in_tensor_parallel(model, mesh)
    divided = in_context_parallel if parallel == "cp" else in_fsdp2
    return divided(model, find_blocks(model), mesh, precision=precision)


def main(parallel, precision, *plans):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    plan = Plan.from_json(plans[0]) if plans else None
    model = wrapped(decoder(**SHAPE).cuda(), parallel, precision, plan)
    batch = {name: tensor.cuda() for name, tensor in token_batch(ROWS, LENGTH).items()}
    settings = StepSettings(precision if parallel in ("ddp", "tp") else "fp32")  # FSDP2 casts by itself
    optimizer = build_optimizer("adamw", model.parameters())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        time.sleep(0.3)  # DDP's first buckets live until NCCL's watchdog has looked again
        forward_backward(model, as_parts([batch], model_loss), model_loss, settings.precision)
        update(model, optimizer, settings)
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps({"rank": rank, **found}) + "\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
