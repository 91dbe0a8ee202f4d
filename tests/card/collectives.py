"""Every collective of NCCL that PyTorch calls, against what gloo brought from the other ranks. Kernels are not run.

    torchrun --nproc-per-node 3 collectives.py [ends]

With "ends" the last rank ends, and rank 0 writes the error with which it waits for it.
"""

import ctypes
import json
import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

COUNT = 300_007  # more than a piece, and no multiple of anything
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def main():
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    if len(sys.argv) > 1:
        wait_for_the_dead(rank, ranks)
    others = dist.new_group(backend="gloo")
    wrong, tried = [], 0

    def check(name, found, expected):
        nonlocal tried
        tried += 1
        exact = name not in ("sum", "mean", "scattered")
        near = torch.equal if exact else lambda a, b: torch.allclose(a.double(), b.double(), rtol=tolerance, atol=0)
        if not near(found.cpu(), expected):
            wrong.append(f"{name} of {found.dtype}")

    for dtype in DTYPES:
        tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6
        x = (torch.rand(COUNT, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype)
        everyone = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(everyone, x, group=others)
        wide = torch.stack(everyone).to(torch.float64 if dtype.is_floating_point else torch.int64)
        part = slice(rank * 1000, rank * 1000 + 1000)
        sums = {"sum": (dist.ReduceOp.SUM, wide.sum(0)), "most": (dist.ReduceOp.MAX, wide.amax(0))}
        sums["least"] = (dist.ReduceOp.MIN, wide.amin(0))
        if dtype.is_floating_point:
            sums["mean"] = (dist.ReduceOp.AVG, wide.mean(0))
        for name, (operation, expected) in sums.items():
            found = x.cuda()
            dist.all_reduce(found, op=operation)
            check(name, found, expected.to(dtype))
        found = torch.empty(COUNT * ranks, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(found, x.cuda())
        check("gathered", found, torch.cat(everyone))
        found = torch.empty(1000, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(found, x[: ranks * 1000].cuda())
        check("scattered", found, wide.sum(0).to(dtype)[part])
        found = torch.empty(ranks * 1000, dtype=dtype, device="cuda")
        dist.all_to_all_single(found, x[: ranks * 1000].cuda())
        check("exchanged", found, torch.cat([each[part] for each in everyone]))
        found = x.cuda()
        dist.broadcast(found, ranks - 1)
        check("broadcast", found, everyone[-1])
        found = torch.empty(COUNT, dtype=dtype, device="cuda")
        around = [dist.P2POp(dist.isend, x.cuda(), (rank + 1) % ranks)]
        around += [dist.P2POp(dist.irecv, found, (rank - 1) % ranks)]
        for message in dist.batch_isend_irecv(around):
            message.wait()
        check("passed on", found, everyone[rank - 1])
    two = dist.new_group([0, 1])
    if rank < 2:
        found = torch.ones(3).cuda()
        dist.all_reduce(found, group=two)
        check("sum of two", found, torch.full((3,), 2.0))
    dist.barrier()
    row = {"rank": rank, "wrong": wrong, "tried": tried, "unmodelled": unmodelled()}
    print(json.dumps(row) + "\n", end="", flush=True)
    dist.destroy_process_group()


def wait_for_the_dead(rank, ranks) -> NoReturn:
    dist.all_reduce(torch.ones(3).cuda())
    if rank == ranks - 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(3).cuda())
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(3).cuda())
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    print(json.dumps({"error": error}) + "\n", end="", flush=True)
    os._exit(0)


def unmodelled():
    """Calls of NCCL's that no source models."""
    library, name = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(96)
    library.card_unmodelled_calls.restype = ctypes.c_long
    calls, at = 0, 0
    while count := library.card_unmodelled_calls(at, name, 96):
        calls += count if b"nccl" in name.value.lower() else 0
        at += 1
    return calls


if __name__ == "__main__":
    main()
