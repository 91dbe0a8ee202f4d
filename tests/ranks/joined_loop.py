"""A loop in DistributedDataParallel, run by torchrun: without a plan and with one, for several settings.

Each rank writes a line of JSON for each setting: whether the weights after some steps are those without a plan.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tightfit
from made_up_devices import even
from tightfit.models.decoder import Decoder
from tightfit.models.decoder_config import DecoderConfig
from tightfit.planner.levers import Exactness

STEPS = 5
CASES = [  # settings of DDP, the budget, the levers
    ({}, "0.8x", "exact"),
    ({"gradient_as_bucket_view": True}, "0.8x", "exact"),
    ({"find_unused_parameters": True}, "0.85x", "exact"),
    ({"gradient_as_bucket_view": True}, "0.6x", ["chunked_loss", "recompute", "micro_batch"]),
]


def batches():
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ids = torch.randint(90, (4, 24), generator=drawn)
        yield {"input_ids": ids, "labels": ids}


def trained(settings, budget=None, levers=None):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(hidden_size=24, num_layers=3, num_heads=2, vocab_size=90))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = applied = None
    if budget is not None:
        found = tightfit.plan(
            model, next(batches()), budget, optimizer=optimizer, device=even(), levers=levers, grad_clip=1.0,
            parallel="ddp", ddp=settings,
        )  # fmt: skip
        applied = found.apply(model)
    joined = DistributedDataParallel(model, **settings)
    for batch in batches():
        if applied is None:
            joined(**batch).loss.backward()
        else:
            applied.backward(batch, model=joined)
        nn.utils.clip_grad_norm_(joined.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], found


def main():
    dist.init_process_group("gloo")
    for settings, budget, levers in CASES:
        plain, _ = trained(settings)
        planned, found = trained(settings, budget, levers)
        pairs = list(zip(plain, planned, strict=True))
        equal = all(torch.equal(*pair) for pair in pairs)
        close = all(torch.allclose(*pair, atol=1e-5) for pair in pairs)
        row = {
            "settings": [settings, budget], "hash": found.hash, "levers": [lever.name for lever in found.levers],
            "exact": all(lever.exactness is Exactness.EXACT for lever in found.levers),
            "same": "equal" if equal else "close" if close else "different",
        }  # fmt: skip
        print(json.dumps(row) + "\n", end="", flush=True)
    dist.destroy_process_group()


main()
