"""The operators whose seconds are published, as modules: what they read are their parameters, so gradients flow there.

A module's `forward` gives the tensor whose gradient the source seeds; `accumulates` names the parameters whose
gradient the source does not set to None before it times, so that the new one is added to it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tightfit.devices.families import Family

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _leaf(*sizes: int, dtype: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(sizes, dtype=DTYPES[dtype]))


class Operator(nn.Module):
    """One operator on its inputs. `draws_gradient`: where "full" is timed, the seed gradient is drawn in it too."""

    accumulates: tuple[str, ...] = ()
    accumulates_in_full: tuple[str, ...] = ()
    draws_gradient = False
    made_before: Family | None = None  # of an operator whose result is there before the clock starts

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        self.build(**{key: value for key, value in config.items() if key != "case"})

    def build(self, **config: Any) -> None:
        raise NotImplementedError  # each operator has its own


class CrossEntropy(Operator):
    accumulates_in_full = ("x",)

    def build(self, rows: int, vocabulary: int, dtype: str) -> None:
        self.x = _leaf(rows, vocabulary, dtype=dtype)
        self.register_buffer("target", torch.zeros(rows, dtype=torch.int64))

    def forward(self) -> Tensor:
        return F.cross_entropy(self.x, self.target)


class HeadAndCrossEntropy(Operator):
    accumulates = ("weight",)
    accumulates_in_full = ("x", "weight")

    def build(self, rows: int, width: int, vocabulary: int, dtype: str) -> None:
        self.x, self.weight = _leaf(rows, width, dtype=dtype), _leaf(vocabulary, width, dtype=dtype)
        self.register_buffer("target", torch.zeros(rows, dtype=torch.int64))

    def forward(self) -> Tensor:
        return F.cross_entropy(F.linear(self.x, self.weight), self.target)


class Embedding(Operator):
    accumulates = ("weight",)
    accumulates_in_full = ("weight",)
    draws_gradient = True

    def build(self, batch: int, length: int, width: int, vocabulary: int, dtype: str) -> None:
        self.weight = _leaf(vocabulary, width, dtype=dtype)
        self.register_buffer("ids", torch.zeros(batch, length, dtype=torch.int64))

    def forward(self) -> Tensor:
        return F.embedding(self.ids, self.weight)


class RmsNormByHand(Operator):
    """As in transformers: in float32, the weight in float32 too, so a result in float32."""

    accumulates = accumulates_in_full = ("weight",)

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x, self.weight = _leaf(rows, width, dtype=dtype), _leaf(width, dtype="float32")

    def forward(self) -> Tensor:
        wide = self.x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(self.x.dtype)


class AddRmsNormByHand(Operator):
    """A sum, and its norm by hand; gradients enter both."""

    accumulates = accumulates_in_full = ("weight",)

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x, self.residual = _leaf(rows, width, dtype=dtype), _leaf(rows, width, dtype=dtype)
        self.weight = _leaf(width, dtype="float32")

    def forward(self) -> tuple[Tensor, Tensor]:
        total = self.x.to(torch.float32) + self.residual.to(torch.float32)
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(self.x.dtype), total.to(self.x.dtype)


class RmsNormFused(Operator):
    """The sum over all results is the loss."""

    accumulates_in_full = ("x", "weight")

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x, self.weight = _leaf(rows, 1, width, dtype=dtype), _leaf(width, dtype=dtype)

    def forward(self) -> Tensor:
        return F.rms_norm(self.x, (self.x.shape[-1],), self.weight, 1e-6)

    def loss(self, result: Tensor) -> Tensor:
        return result.sum()


class GateOfHalves(RmsNormFused):
    """SwiGLU of two halves of one tensor."""

    accumulates_in_full = ()

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x = _leaf(rows, 1, 2 * width, dtype=dtype)

    def forward(self) -> Tensor:
        gate, up = torch.chunk(self.x, 2, -1)
        return F.silu(gate) * up


class LayerNorm(Operator):
    accumulates = accumulates_in_full = ("weight", "bias")

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x = _leaf(rows, width, dtype=dtype)
        self.weight, self.bias = _leaf(width, dtype=dtype), _leaf(width, dtype=dtype)

    def forward(self) -> Tensor:
        return F.layer_norm(self.x, (self.x.shape[-1],), self.weight, self.bias, 1e-6)


class GatedMlp(Operator):
    accumulates = accumulates_in_full = ("gate", "up", "down")
    draws_gradient = True

    def build(self, batch: int, length: int, width: int, inner: int, activation: str, dtype: str) -> None:
        self.x = _leaf(batch, length, width, dtype=dtype)
        self.gate, self.up = _leaf(inner, width, dtype=dtype), _leaf(inner, width, dtype=dtype)
        self.down = _leaf(width, inner, dtype=dtype)

    def forward(self) -> Tensor:
        gate = F.linear(self.x, self.gate)
        active = F.silu(gate) if self.config["activation"] == "silu" else F.gelu(gate, approximate="tanh")
        return F.linear(active * F.linear(self.x, self.up), self.down)


def rotate_half(x: Tensor) -> Tensor:
    """The halves of the last dimension turned by a quarter, by slices and a concatenation."""
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Rotary(Operator):
    def build(self, length: int, width: int, query_heads: int, key_heads: int, dtype: str) -> None:
        head = width // query_heads
        self.query = _leaf(1, length, query_heads, head, dtype=dtype)
        self.key = _leaf(1, length, key_heads, head, dtype=dtype)
        self.register_buffer("cos", torch.empty(1, length, head, dtype=DTYPES[dtype]))
        self.register_buffer("sin", torch.empty(1, length, head, dtype=DTYPES[dtype]))

    def forward(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        query, key = self.query.transpose(1, 2), self.key.transpose(1, 2)
        return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


class ReluSquared(Operator):
    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x = _leaf(rows, width, dtype=dtype)

    def forward(self) -> Tensor:
        return torch.square(F.relu(self.x))


class Softmax(ReluSquared):
    def forward(self) -> Tensor:
        return torch.softmax(self.x, dim=-1)


class TotalVariation(Operator):
    """Half the distance of two distributions; the backward goes through the softmax that made the first of them."""

    accumulates = accumulates_in_full = ("x",)
    made_before = Family.SOFTMAX

    def build(self, rows: int, width: int, dtype: str) -> None:
        self.x = _leaf(rows, width, dtype=dtype)
        self.register_buffer("target", torch.empty(rows, width, dtype=DTYPES[dtype]))

    def forward(self) -> Tensor:
        made = self.x.softmax(dim=-1)
        return (torch.abs(made - self.target) / 2.0).sum() / self.x.shape[0]


class MaskedAttention(Operator):
    """Attention by hand between four projections, a mask hiding most of the scores."""

    accumulates = ("weights", "biases")

    def build(self, batch: int, length: int, width: int, heads: int, dtype: str) -> None:
        self.x = _leaf(batch, length, width, dtype=dtype)
        self.weights = nn.ParameterList(_leaf(width, width, dtype=dtype) for _ in range(4))
        self.biases = nn.ParameterList(_leaf(width, dtype=dtype) for _ in range(4))
        self.register_buffer("hidden", torch.zeros(length, length, dtype=torch.bool))

    def forward(self) -> Tensor:
        batch, length, width = self.x.shape
        heads = self.config["heads"]
        query, key, value = (
            F.linear(self.x, self.weights[i], self.biases[i]).view(batch, length, heads, -1).transpose(1, 2)
            for i in range(3)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) * (1 / math.sqrt(width // heads))
        weights = torch.softmax(scores.masked_fill(self.hidden, float("-inf")), dim=-1)
        mixed = torch.matmul(weights, value).transpose(1, 2).contiguous().view(batch, length, width)
        return F.linear(mixed, self.weights[3], self.biases[3])


CASES: dict[str, type[Operator]] = {
    "cross_entropy": CrossEntropy,
    "head_and_cross_entropy": HeadAndCrossEntropy,
    "embedding": Embedding,
    "rms_norm_by_hand": RmsNormByHand,
    "add_rms_norm_by_hand": AddRmsNormByHand,
    "rms_norm_fused": RmsNormFused,
    "gate_of_halves": GateOfHalves,
    "layer_norm": LayerNorm,
    "gated_mlp": GatedMlp,
    "rotary": Rotary,
    "relu_squared": ReluSquared,
    "softmax": Softmax,
    "total_variation": TotalVariation,
    "masked_attention": MaskedAttention,
}
