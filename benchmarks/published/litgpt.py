"""litgpt's models and finetuning step as its commit 8641822 defines them, written anew: LoRA and adapters in bf16.

Lightning's Fabric casts what the model returns to fp32; the logits and their losses are in chunks of 128 positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 128  # `lm_head_chunk_size`


@dataclass(frozen=True)
class Shape:
    """A model's configuration, `lit_gpt/config.py`."""

    layers: int
    width: int
    vocabulary: int
    heads: int = 32
    rotary: float = 0.25
    parallel: bool = True  # attention and feed-forward read the same residual
    shared_norm: bool = False
    bias: bool = True
    head_bias: bool = False
    llama: bool = False  # RMS norms and a gated feed-forward
    inner: int = 0
    tanh: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SHAPES = {
    "phi-1_5": Shape(24, 2048, 51200, rotary=0.5, shared_norm=True, head_bias=True, tanh=True),
    "stablelm-base-alpha-3b": Shape(16, 4096, 50688),
    "Llama-2-7b-hf": Shape(32, 4096, 32000, rotary=1.0, parallel=False, bias=False, llama=True, inner=11008),
    "Llama-2-13b-hf": Shape(40, 5120, 32000, 40, rotary=1.0, parallel=False, bias=False, llama=True, inner=13824),
}


class Linear(nn.Module):
    """A frozen linear layer; with `adapter` scaled and shifted (adapter v2)."""

    def __init__(self, rows: int, columns: int, bias: bool, adapter: bool = False):
        super().__init__()
        self.linear = nn.Linear(rows, columns, bias=bias)
        if adapter:
            self.adapter_bias = nn.Parameter(torch.zeros(columns))
            self.adapter_scale = nn.Parameter(torch.ones(columns))
        self.adapter = adapter

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.adapter_scale * (y + self.adapter_bias) if self.adapter else y


class LoraQKV(nn.Module):
    """Rank-8 updates of queries and values beside a frozen projection to queries, keys and values."""

    def __init__(self, width: int, bias: bool, rank: int = 8, dropout: float = 0.05):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.lora_A = nn.Parameter(torch.zeros(2 * rank, width))
        self.lora_B = nn.Parameter(torch.zeros(2 * width, rank))
        self.lora_dropout = nn.Dropout(dropout)
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_a = F.linear(self.lora_dropout(x), self.lora_A)
        after_b = F.conv1d(after_a.transpose(-2, -1), self.lora_B.unsqueeze(-1), groups=2).transpose(-2, -1)
        lora = self.zero_pad(after_b) * self.scaling
        return pretrained + lora

    def zero_pad(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], 3 * self.width)).view(-1, 3 * self.width)
        places = torch.cat([torch.arange(self.width), torch.arange(2 * self.width, 3 * self.width)])
        result = result.index_copy(1, places, x.reshape(-1, 2 * self.width))
        return result.view((*x.shape[:-1], 3 * self.width)).transpose(0, 1)


class Norm(nn.Module):
    """litgpt's own RMS norm, computed in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (self.weight * normed).to(dtype=dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    left = x[..., :half]
    right = x[..., half:]
    turned = torch.cat((-right, left), dim=-1)
    roped = (x * cos) + (turned * sin)
    return roped.type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int):
        super().__init__()
        v2 = method == "adapter_v2"
        bias, width = shape.bias, shape.width
        self.attn = LoraQKV(width, bias) if method == "lora" else Linear(width, 3 * width, bias, v2)
        self.proj = Linear(width, width, bias, v2)
        self.shape = shape
        self.has_prompt = method.startswith("adapter") and index >= 2
        if self.has_prompt:
            self.adapter_wte = nn.Embedding(10, width)
            self.gating_factor = nn.Parameter(torch.zeros(1, 1, shape.heads, 1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size, length, width = x.size()
        heads, head = self.shape.heads, self.shape.head_width
        qkv = self.attn(x)
        qkv = qkv.view(size, length, heads, 3, head)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((1, 1, 1), dim=2)
        q = q.reshape(size, -1, length, head)
        k = k.reshape(size, -1, length, head)
        v = v.reshape(size, -1, length, head)
        rotary = int(self.shape.rotary * head)
        q_roped = rotate(q[..., :rotary], cos, sin)
        k_roped = rotate(k[..., :rotary], cos, sin)
        q = torch.cat((q_roped, q[..., rotary:]), dim=-1)
        k = torch.cat((k_roped, k[..., rotary:]), dim=-1)
        y = self.attended(q, k, v)
        y = y.reshape(size, length, width)
        return self.proj(y)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = attend(q, k, v, None)
        if not self.has_prompt:
            return y
        heads, head = self.shape.heads, self.shape.head_width
        prefix = self.adapter_wte.weight.reshape(1, 10, self.shape.width)
        aqkv = self.attn(prefix)
        aqkv = aqkv.view(1, 10, heads, 3, head).permute(0, 2, 3, 1, 4)
        _, ak, av = aqkv.split((1, 1, 1), dim=2)
        ak = ak.repeat_interleave(1, dim=2).view(1, -1, 10, head)
        av = av.repeat_interleave(1, dim=2).view(1, -1, 10, head)
        mask = torch.ones(q.size(2), 10, dtype=torch.bool)
        ay = attend(q, ak, av, mask)
        return y + self.gating_factor * ay


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scale = 1.0 / math.sqrt(q.size(-1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, is_causal=mask is None).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape, v2: bool):
        super().__init__()
        inner = shape.inner or 4 * shape.width
        self.fc = Linear(shape.width, inner, shape.bias, v2)
        self.up = Linear(shape.width, inner, shape.bias, v2) if shape.llama else None
        self.proj = Linear(inner, shape.width, shape.bias, v2)
        self.approximate = "tanh" if shape.tanh else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.up is not None:
            gate = self.fc(x)
            up = self.up(x)
            x = F.silu(gate) * up
            return self.proj(x)
        x = self.fc(x)
        x = F.gelu(x, approximate=self.approximate)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, shape: Shape, method: str, index: int):
        super().__init__()
        norm = Norm if shape.llama else nn.LayerNorm
        self.norm_1 = norm(shape.width)
        self.attn = Attention(shape, method, index)
        self.norm_2 = None if shape.shared_norm else norm(shape.width)
        self.mlp = FeedForward(shape, method == "adapter_v2")
        self.parallel = shape.parallel

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_1 = self.norm_1(x)
        h = self.attn(n_1, cos, sin)
        if self.parallel:
            n_2 = n_1 if self.norm_2 is None else self.norm_2(x)
            return self.mlp(n_2) + h + x
        assert self.norm_2 is not None
        x = h + x
        return self.mlp(self.norm_2(x)) + x


class Model(nn.Module):
    """Frozen but for what the method trains."""

    def __init__(self, name: str, method: str, length: int):
        super().__init__()
        shape = SHAPES[name]
        self.lm_head = Linear(shape.width, shape.vocabulary, shape.head_bias, method == "adapter_v2")
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape, method, index) for index in range(shape.layers))
        self.ln_f = (Norm if shape.llama else nn.LayerNorm)(shape.width)
        self.to(torch.bfloat16)
        rotary = int(shape.rotary * shape.head_width)
        for buffer in ("cos", "sin"):  # made anew in fp32 once the longest sample is known
            self.register_buffer(buffer, torch.zeros(length, rotary), persistent=False)
        trained = TRAINED[method]
        for key, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in key for part in trained))

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.wte(ids)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        x = self.ln_f(x)
        return [self.lm_head(part) for part in x.split(CHUNK, dim=1)]


TRAINED = {
    "lora": ("lora_",),
    "adapter": ("adapter_wte", "gating_factor"),
    "adapter_v2": ("adapter_wte", "gating_factor", "adapter_scale", "adapter_bias", "norm_1", "norm_2", "ln_f"),
}


class Loss:
    """Mutable: `chunked_cross_entropy` of the shifted targets; the logits are the loop's variable during backward.

    The longest sample comes first, and only there: no logits of an equally long one before it are held meanwhile.
    """

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        self.logits = []
        logits = self.logits = [part.float() for part in model(batch["ids"])]
        logits[-1] = logits[-1][..., :-1, :]
        targets = batch["labels"][..., 1:]
        chunks = [part.reshape(-1, part.size(-1)) for part in logits]
        labels = [part.reshape(-1) for part in targets.split(logits[0].size(1), dim=1)]
        losses = [
            F.cross_entropy(part, label, ignore_index=-1, reduction="none")
            for part, label in zip(chunks, labels, strict=True)
        ]
        return torch.cat(losses).mean() / batch["accumulated"]
