"""A loop in nanoGPT's style in DistributedDataParallel, with gradient accumulation:

torchrun --nproc-per-node 2 examples/ddp_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import tightfit

VOCABULARY, WIDTH, BATCH, LENGTH, ACCUMULATION = 64, 32, 4, 64, 3
SETTINGS = {"gradient_as_bucket_view": True}  # of DDP, and so of the plan


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, 0.0, F.gelu, batch_first=True) for _ in range(6))
        self.wte, self.h = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(layers)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, targets):
        x, mask = self.wte(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.h:
            x = block(x, mask, is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(size):
    return torch.randint(VOCABULARY, (2, size, LENGTH)).unbind()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = GPT()
torch.manual_seed(dist.get_rank())  # each rank has batches of its own
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plan = tightfit.plan(  # rank 0 makes it for all: for a whole step of a rank, one batch of all its micro-batches
    model, get_batch(BATCH * ACCUMULATION), "0.6x", optimizer=optimizer, micro_batches=ACCUMULATION, grad_clip=1.0,
    parallel="ddp", ddp=SETTINGS,
)  # fmt: skip
plan.apply(model)
joined = DistributedDataParallel(model, **SETTINGS)
with tightfit.monitor(joined, optimizer) as watch:
    for _ in range(4):
        for number in range(ACCUMULATION):
            joined.require_backward_grad_sync = number == ACCUMULATION - 1
            loss = joined(*get_batch(BATCH))[1] / ACCUMULATION  # a name would keep the logits in memory
            loss.backward()
        nn.utils.clip_grad_norm_(joined.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print("loss", loss.item())
print(f"measured peak {watch.peak_bytes}, budget {plan.budget_bytes}, without the plan {plan.plain_peak_bytes}")
dist.destroy_process_group()
