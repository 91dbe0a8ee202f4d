"""Ranks of tensor or context parallel on cards with true values, over NCCL. torchrun runs it, with FOLDER and CASES.

Each writes a line of JSON: its number, and what `divided_ranks.told_of` says of the cases that are prepared there.
"""

import json
import sys

import torch
import torch.distributed as dist
from divided_ranks import told_of

from tightfit.devices.nullcard.values import true_values


def main(folder, cases):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    with true_values():
        told = told_of(rank, dist.get_world_size(), folder, json.loads(cases), "cuda")
    print(json.dumps({"rank": rank, "told": told}) + "\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
