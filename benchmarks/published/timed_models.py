"""The models whose training steps are published: only what decides their operators and shapes."""

import math
from typing import Any

import torch
from benchmarks.published.timed_operators import rotate_half
from torch import Tensor, nn
from torch.nn import functional as F


class FusedCrossEntropy(torch.autograd.Function):
    """Stands for a kernel that reads the logits once forward, and reads and writes them once backward.

    MosaicML's figures use flash-attn's; its bytes are said here by a maximum over rows and a product.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(-1).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return logits * 0.5


class MptBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        sides = self.qkv(self.norm_1(x)).chunk(3, dim=2)
        query, key, value = (s.reshape(batch, length, self.heads, -1).transpose(1, 2) for s in sides)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MosaicML's MPT: positions learned, head tied, weights in the precision of the products (FSDP casts them)."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(MptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return FusedCrossEntropy.apply(logits.view(-1, logits.shape[-1]))


class NormByHand(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class AttentionByHand(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        sides = (side(x) for side in (self.query, self.key, self.value))
        query, key, value = (s.view(batch, length, self.heads, -1).transpose(1, 2) for s in sides)
        scores = query @ key.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ value).transpose(1, 2).contiguous().view(batch, length, width))


class GeluByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = torch.sqrt(torch.tensor(2.0 / math.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class BlockByHand(nn.Module):
    def __init__(self, width: int, heads: int, length: int, dropout: float):
        super().__init__()
        self.norm_1, self.norm_2 = NormByHand(width), NormByHand(width)
        self.attention = AttentionByHand(width, heads, length, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), GeluByHand(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.norm_1(x))) + x
        return self.dropout(self.mlp(self.norm_2(x))) + x


class GptByHand(nn.Module):
    """A GPT-2 as a textbook writes it: norms, GELU, attention and its mask by hand; the head not tied."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int, length: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(BlockByHand(width, heads, length, dropout) for _ in range(layers)))
        self.norm, self.head = NormByHand(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class WideRmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Of TinyLlama 1.1B: 32 heads of 64 that share 4 keys and values."""

    WIDTH, HEADS, GROUPS, INNER = 2048, 32, 4, 5632

    def __init__(self) -> None:
        super().__init__()
        width, head = self.WIDTH, self.WIDTH // self.HEADS
        self.norm_1, self.norm_2 = WideRmsNorm(width), WideRmsNorm(width)
        self.qkv = nn.Linear(width, (self.HEADS + 2 * self.GROUPS) * head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, self.INNER, bias=False), nn.Linear(width, self.INNER, bias=False)
        self.down = nn.Linear(self.INNER, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        per_group, head = self.HEADS // self.GROUPS, width // self.HEADS
        qkv = self.qkv(self.norm_1(x)).view(batch, length, self.GROUPS, per_group + 2, head).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((per_group, 1, 1), dim=2)
        key, value = (s.expand(batch, self.GROUPS, per_group, length, head) for s in (key, value))
        query, key, value = (s.reshape(batch, -1, length, head) for s in (query, key, value))
        query, key = (s * cos + rotate_half(s) * sin for s in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class TinyLlama(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(32000, 2048), nn.Linear(2048, 32000, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(22))
        self.norm = WideRmsNorm(2048)
        self.register_buffer("cos", torch.ones(length, 64))
        self.register_buffer("sin", torch.ones(length, 64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))


def build(config: dict[str, Any]) -> nn.Module:
    """The model of a published step, in the dtype that it runs in."""
    shape = {key: config[key] for key in ("width", "heads", "layers", "vocabulary", "length") if key in config}
    match config["case"]:
        case "mpt":
            return Mpt(**shape).to(torch.bfloat16)
        case "gpt_by_hand":
            return GptByHand(**shape, dropout=config["dropout"])
        case "tinyllama":
            return TinyLlama(config["length"]).to(torch.bfloat16)
    raise AssertionError(f"no model for {config['case']}")
