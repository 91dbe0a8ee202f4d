"""A model of repeated blocks with dropout, and what the allocator records of it."""

import torch.nn.functional as F
from torch import nn

from exactness import allocator_record

WIDTH, TOKENS, BATCH, BLOCKS, HEADS = 32, 64, 2, 6, 4
STREAM_BYTES = BATCH * TOKENS * WIDTH * 4  # one residual stream in fp32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + self.down(F.gelu(self.up(self.after(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def forward_bytes(model, ids):
    """Bytes alive when the forward is over and its graph still stands."""
    losses = []
    _, left = allocator_record(lambda: losses.append(model(ids)))
    return left


def step_peak(model, ids):
    """The highest point of a step whose gradients are already there."""

    def step():
        model(ids).backward()

    step()
    peak, left = allocator_record(step)
    assert left == 0, "a step left memory behind"
    return peak
