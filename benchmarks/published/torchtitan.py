"""torchtitan's Llama and Qwen3 under FSDP2 as its commits of 2024 and 2025 define them, written anew.

What changed from commit to commit, and decides bytes, is in `Version`: the norm, where logits become fp32 and how long
they live, which modules FSDP2 wraps, the optimizer's implementation, and the allocator's setting.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tightfit.ranks.wrapping import mixed_precision
from tightfit.runtime.internals import fake_process_group

Checkpoint = Literal["none", "full", "operators"]
Reshard = Literal["default", "always", "never"]
aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """A model's configuration. Heads are 128 numbers wide."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    norms_of_heads: bool = False  # Qwen3's, of queries and keys

    @property
    def head_width(self) -> int:
        return 128


SHAPES = {
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "llama2-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    "qwen3-32b": Shape(64, 5120, 64, 8, 25600, 151936, norms_of_heads=True),
}


@dataclass(frozen=True)
class Version:
    """What of a commit decides bytes."""

    norm: Literal["own", "composite", "fused"] = "fused"  # PyTorch's own one was single operators until 2.8
    logits: Literal["16 bits", "fp32 by the model", "fp32 by the loss"] = "fp32 by the loss"
    keeps_logits: bool = False  # the loop's variable holds them in backward, and in the next forward
    loss_chunks: int = 1
    wraps: Literal["blocks", "blocks and ends"] = "blocks"
    weights: Literal["fp32", "bf16"] = "fp32"  # of shards; gathered ones are in bf16
    optimizer: str = "adamw"
    expandable: bool = True
    rotary_rows: int = 8192


VERSIONS = {
    "llama-recipes 2023-08": Version("own", "fp32 by the model", weights="bf16", expandable=False),
    "2024-03": Version("own", "16 bits", keeps_logits=True, expandable=False, rotary_rows=65536),
    "2024-06": Version("own", "fp32 by the model", keeps_logits=True, expandable=False, rotary_rows=16384),
    "2024-11": Version("own"),
    "2025-03-20": Version("own", optimizer="adamw_fused"),
    "2025-03-20, loss in 8 chunks": Version("own", optimizer="adamw_fused", loss_chunks=8),
    "2025-06": Version("composite", optimizer="adamw_fused"),
    "2025-09": Version("fused", wraps="blocks and ends", optimizer="adamw_fused"),
}


class SingleOperators(nn.Module):
    """An RMS norm in fp32; the weight multiplies in fp32 too, or after it."""

    def __init__(self, width: int, weighs_in_fp32: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.weighs_in_fp32 = weighs_in_fp32

    def forward(self, x: Tensor) -> Tensor:
        if self.weighs_in_fp32:
            return (scaled(x.float()) * self.weight).type_as(x)
        return scaled(x.float()).type_as(x) * self.weight


def scaled(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def turned_as_complex(x: Tensor, factors: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def turned_by_halves(x: Tensor, factors: Tensor) -> Tensor:
    cosines, sines = factors[: x.shape[1]].view(1, x.shape[1], 1, -1).to(x.dtype).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-right, left), dim=-1) * sines).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    size, length, heads, width = x.shape
    if times == 1:
        return x
    return x[:, :, :, None, :].expand(size, length, heads, times, width).reshape(size, length, heads * times, width)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        rows = shape.heads * shape.head_width
        self.wq = nn.Linear(shape.width, rows, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.wo = nn.Linear(rows, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_width, eps=1e-6) if shape.norms_of_heads else None
        self.k_norm = nn.RMSNorm(shape.head_width, eps=1e-6) if shape.norms_of_heads else None

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k, v = (linear(x).view(size, length, -1, self.shape.head_width) for linear in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        turned = turned_by_halves if self.shape.norms_of_heads else turned_as_complex
        q, k = turned(q, factors), turned(k, factors)
        times = self.shape.heads // self.shape.kv_heads
        keys, values = repeated(k, times), repeated(v, times)
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = seen.transpose(1, 2).contiguous()
        return self.wo(seen.view(size, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.inner, bias=False)
        self.w2 = nn.Linear(shape.inner, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, version: Version):
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = norm_of(shape, version)
        self.ffn_norm = norm_of(shape, version)

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), factors)
        return h + self.feed_forward(self.ffn_norm(h))


def norm_of(shape: Shape, version: Version) -> nn.Module:
    if version.norm == "fused":
        return nn.RMSNorm(shape.width, eps=1e-5)
    return SingleOperators(shape.width, weighs_in_fp32=version.norm == "composite")


class Model(nn.Module):
    def __init__(self, name: str, version: Version, checkpoint: Checkpoint):
        super().__init__()
        shape = SHAPES[name]
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        blocks = [Block(shape, version) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(checkpointed(block, checkpoint) for block in blocks)
        self.norm = norm_of(shape, version)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        half = shape.head_width // 2
        factors = (
            torch.zeros(version.rotary_rows, 2 * shape.head_width)
            if shape.norms_of_heads
            else torch.zeros(version.rotary_rows, half, dtype=torch.complex64)
        )
        self.register_buffer("factors", factors, persistent=False)
        self.in_fp32 = version.logits == "fp32 by the model"
        if version.weights == "bf16":
            for parameter in self.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h, self.factors)
        logits = self.output(self.norm(h))
        return logits.float() if self.in_fp32 else logits


def checkpointed(block: nn.Module, mode: Checkpoint) -> nn.Module:
    if mode == "none":
        return block
    more: dict[str, Any] = {} if mode == "full" else {"context_fn": keeping_operators}
    return checkpoint_wrapper(block, preserve_rng_state=False, **more)


ATTENTION = {getattr(aten, f"_scaled_dot_product_{name}_attention").default for name in ("efficient", "flash", "cudnn")}


def keeping_operators() -> Any:
    """Every second product and the attention are kept."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator in ATTENTION
        if operator is aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Loss:
    """Mutable: the mean over all tokens. `held` are the logits where the loop keeps them."""

    def __init__(self, version: Version):
        self.version = version
        self.held: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])
        if self.version.keeps_logits:
            self.held = logits
        chunks = self.version.loss_chunks
        losses = [
            self._of(part, labels)
            for part, labels in zip(logits.chunk(chunks, dim=1), batch["labels"].chunk(chunks, dim=1), strict=True)
        ]
        return losses[0] if chunks == 1 else sum(losses[1:], losses[0]) / chunks

    def _of(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.flatten(0, 1)
        if self.version.logits == "fp32 by the loss":
            flat = flat.float()
        return F.cross_entropy(flat, labels.flatten(0, 1))


@dataclass(frozen=True)
class TitanRank:
    """Rank 0 of so many, as a dry run plays it (`tightfit.tracing.surroundings.Rank`)."""

    ranks: int
    reshard: Reshard
    version: Version
    steps: int = 2
    reduces_once: bool = False
    is_on_host: bool = False

    @contextmanager
    def simulated(self) -> Iterator[None]:
        with fake_process_group(0, self.ranks):
            yield

    def wrapped(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        made: Any = model
        shared: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (self.ranks,)),
            "mp_policy": mixed_precision("bf16" if self.version.weights == "fp32" else "fp32"),
        }
        by_ends = self.version.wraps == "blocks and ends"
        if by_ends:
            fully_shard(made.tok_embeddings, reshard_after_forward=self.reshard != "never", **shared)
        last = len(made.layers) - 1
        for number, layer in enumerate(made.layers):
            # Only the later commits free the last block's weights after its forward.
            frees = self.reshard == "always" or (self.reshard == "default" and (by_ends or number < last))
            fully_shard(layer, reshard_after_forward=frees, **shared)
        if by_ends:
            fully_shard([made.norm, made.output], reshard_after_forward=self.reshard == "always", **shared)
        return fully_shard(made, **shared)  # FSDP2's own default for the root, which keeps its weights


@contextmanager
def allocator_setting(*, expandable: bool) -> Iterator[None]:
    """The environment in which a process was started: whether segments of CUDA's allocator grow."""
    name = "PYTORCH_ALLOC_CONF"
    before = {key: os.environ.pop(key, None) for key in (name, "PYTORCH_CUDA_ALLOC_CONF")}
    if expandable:
        os.environ[name] = "expandable_segments:True"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({key: value for key, value in before.items() if value is not None})
