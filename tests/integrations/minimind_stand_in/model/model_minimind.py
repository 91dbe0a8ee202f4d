"""A small decoder with the habits of MiniMind's that make it hard to plan for; no line of it is MiniMind's.

Residuals are added in place, blocks return tuples, the router's auxiliary loss stays on the module, experts are skipped
by looking at the data, and rotary angles are handed from outside into every block.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Output:
    def __init__(self, loss, aux_loss, logits, presents):
        self.loss, self.aux_loss, self.logits, self.presents = loss, aux_loss, logits, presents


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self, width, count=3):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Gated(width) for _ in range(count))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        shares = self.router(flat).softmax(-1)
        weight, chosen = shares.max(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            hit = chosen == number
            if hit.any():
                rows = hit.nonzero().flatten()
                y.index_add_(0, rows, expert(flat[rows]) * weight[rows, None])
            elif self.training:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.aux_loss = (load * shares.mean(0)).sum() * 0.01
        return y.view_as(x)


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x, angles, use_cache=False):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = angles
        q, k = (t * cos + torch.cat(t.chunk(2, -1)[::-1], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2)), ((k, v) if use_cache else None)


class Block(nn.Module):
    def __init__(self, width, use_moe):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn = Attention(width)
        self.mlp = Experts(width) if use_moe else Gated(width)

    def forward(self, hidden, angles, use_cache=False):
        residual = hidden
        hidden, present = self.self_attn(self.attention_norm(hidden), angles, use_cache)
        hidden += residual
        return hidden + self.mlp(self.mlp_norm(hidden)), present


class MiniMindForCausalLM(nn.Module):
    def __init__(self, vocabulary=64, width=32, layers=6, use_moe=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, use_moe) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight
        position = torch.arange(256)[:, None] / 100 ** (torch.arange(width // 2) / width)
        self.register_buffer("cos", position.cos(), persistent=False)
        self.register_buffer("sin", position.sin(), persistent=False)

    def forward(self, input_ids, labels=None, use_cache=False):
        hidden, presents = self.embed(input_ids), []
        angles = self.cos[: input_ids.shape[1]], self.sin[: input_ids.shape[1]]
        for layer in self.layers:
            hidden, present = layer(hidden, angles, use_cache=use_cache)
            presents.append(present)
        aux_loss = sum((b.mlp.aux_loss for b in self.layers if isinstance(b.mlp, Experts)), hidden.new_zeros(()))
        logits = self.lm_head(self.norm(hidden))
        loss = None
        if labels is not None:
            x, y = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            loss = F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1), ignore_index=-100)
        return Output(loss, aux_loss, logits, presents)
