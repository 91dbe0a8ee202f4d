"""Single operators and layers as Liger-Kernel's benchmark scripts set them up for plain PyTorch, written anew.

Each function makes the tensors that its script makes, those of the other implementations beside it too, and returns
what is measured. Forward means `y = layer(x)`; full means forward and backward with the graph kept; gradients stay
from one run to the next and are added to, as the scripts never clear them.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from benchmarks.published import philox
from torch import Tensor, nn
from torch.nn import functional as F

H100_PROCESSORS = 132
Configuration = Mapping[str, Any]
Measured = Callable[[], Any]


def dtype_of(c: Configuration, default: torch.dtype = torch.float32) -> torch.dtype:
    return getattr(torch, c["dtype"]) if "dtype" in c else default


def in_mode(mode: str, forward: Callable[[], Tensor], gradient: Callable[[Tensor], Tensor]) -> Measured:
    """What is measured in a mode: the forward, backward over a graph made before, or both."""
    if mode == "forward":
        return forward
    if mode == "backward":
        out = forward()
        given = gradient(out)
        return lambda: out.backward(given, retain_graph=True)

    def full() -> None:
        out = forward()
        out.backward(gradient(out), retain_graph=True)

    return full


# Losses


def cross_entropy(c: Configuration, mode: str, provider: str) -> Measured:
    logits = torch.randn(c["B"] * c["T"], c["V"], requires_grad=True)
    target = torch.randint(c["V"], (c["B"] * c["T"],))
    return lambda: F.cross_entropy(logits, target).backward()


def kl_div(c: Configuration, mode: str, provider: str) -> Measured:
    rows = c["B"] * c["T"]
    given = torch.randn(rows, c["V"], requires_grad=True).log_softmax(-1)
    target = torch.randn(rows, c["V"]).softmax(-1)
    return lambda: F.kl_div(given, target, reduction="batchmean").backward(retain_graph=True)


def tvd(c: Configuration, mode: str, provider: str) -> Measured:
    rows = c["B"] * c["T"]
    p = torch.randn(rows, c["V"], requires_grad=True).softmax(-1)
    q = torch.randn(rows, c["V"]).softmax(-1)

    def forward() -> Tensor:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)

    return lambda: forward().backward(retain_graph=True)


def jensen_shannon(log_q: Tensor, log_p: Tensor, dtype: torch.dtype = torch.float32, beta: float = 0.5) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    mixture = torch.lerp(torch.exp(log_p), torch.exp(log_q), beta)
    left = F.kl_div(torch.log(mixture), log_p, reduction="batchmean", log_target=True)
    right = F.kl_div(torch.log(mixture), log_q, reduction="batchmean", log_target=True)
    return (beta * left + (1 - beta) * right).to(dtype)


def jensen_shannon_by_row(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    mixture = torch.lerp(torch.exp(log_q), torch.exp(log_p), beta)
    loss = beta * F.kl_div(torch.log(mixture), log_p, reduction="none", log_target=True).sum(dim=-1) + (
        1 - beta
    ) * F.kl_div(torch.log(mixture), log_q, reduction="none", log_target=True).sum(dim=-1)
    return (loss / log_q.shape[0]).sum()


def jsd(c: Configuration, mode: str, provider: str) -> Measured:
    by_row = "vocab_size" in c
    rows, vocabulary = (c["BT"], c["vocab_size"]) if by_row else (c["B"] * c["T"], c["V"])
    given = torch.randn(rows, vocabulary, requires_grad=True).log_softmax(-1)
    target = torch.randn(rows, vocabulary).log_softmax(-1)
    if by_row:  # later scripts
        return in_mode(mode, lambda: jensen_shannon_by_row(given, target), torch.randn_like)
    return lambda: jensen_shannon(given, target).backward(retain_graph=True)


def fused_linear_jsd(c: Configuration, mode: str, provider: str) -> Measured:
    dtype = dtype_of(c)
    student = torch.rand(c["V"], c["H"], dtype=dtype).requires_grad_()
    teacher = torch.rand(c["V"], c["H"], dtype=dtype).requires_grad_()
    student_in = torch.rand(c["BT"], c["H"], dtype=dtype, requires_grad=True)
    teacher_in = torch.rand(c["BT"], c["H"], dtype=dtype)

    def forward() -> Tensor:
        student_logits = F.linear(student_in, student)
        teacher_logits = F.linear(teacher_in, teacher)
        student_prob = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher_prob = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return jensen_shannon(student_prob, teacher_prob, dtype)

    return lambda: forward().backward()


def fused_linear_cross_entropy(c: Configuration, mode: str, provider: str) -> Measured:
    dtype = dtype_of(c)
    weight = torch.randn(c["V"], c["H"], dtype=dtype).requires_grad_()
    other = torch.randn(c["V"], c["H"], dtype=dtype)
    given = torch.randn(c["BT"], c["H"], dtype=dtype, requires_grad=True)
    target = torch.randint(c["V"], (c["BT"],))

    def forward() -> Tensor:
        logits = F.linear(given, weight)
        return F.cross_entropy(logits, target)

    return holding(lambda: forward().backward(), other)


def holding(measured: Measured, *held: Any) -> Measured:
    """What is measured, with more that the script keeps alive meanwhile."""

    def run() -> Any:
        assert held is not None
        return measured()

    return run


# Norms


def layer_norm(c: Configuration, mode: str, provider: str) -> Measured:
    rows, width = c["M"], c["N"]
    other, layer = nn.LayerNorm(width), nn.LayerNorm(width, eps=c["eps"])
    x = torch.randn(rows, width, dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return holding(in_mode(mode, lambda: layer(x), lambda y: dy), other)


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + eps)
    return weight * x.to(dtype)


def rms_norm(c: Configuration, mode: str, provider: str) -> Measured:
    rows, width = c["M"], c["H"]
    other, weight = torch.ones(width), nn.Parameter(torch.ones(width))
    x = torch.randn(rows, width, dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return holding(in_mode(mode, lambda: llama_norm(x, weight, c["eps"]), lambda y: dy), other)


def fused_add_rms_norm(c: Configuration, mode: str, provider: str) -> Measured:
    rows, width = c["M"], c["H"]
    others = [torch.ones(width) for _ in range(3)]
    weight = nn.Parameter(torch.ones(width))
    x, residual = torch.randn(rows, width, dtype=dtype_of(c)), torch.randn(rows, width, dtype=dtype_of(c))
    dy, ds = torch.randn_like(x), torch.randn_like(residual)
    x.requires_grad_(True)
    residual.requires_grad_(True)

    def forward(hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        dtype = hidden.dtype
        hidden, added = hidden.to(torch.float32), added.to(torch.float32)
        hidden = hidden + added
        added = hidden
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + c["eps"])
        return weight * hidden.to(dtype), added.to(dtype)

    def full() -> None:
        y, s = forward(x, residual)
        torch.autograd.backward((y, s), (dy, ds))

    return holding(full, others)


def group_norm(c: Configuration, mode: str, provider: str) -> Measured:
    channels = c["C"]
    groups = channels // c["channels_per_group"]
    other, layer = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels, eps=c["eps"])
    x = torch.randn(c["M"], channels, c["H"], dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return holding(in_mode("full", lambda: layer(x), lambda y: dy), other)  # the script measures full in every mode


def megatron_rms_norm(c: Configuration, mode: str, provider: str) -> Measured:
    layer = nn.RMSNorm(c["H"], eps=1e-6).to(torch.bfloat16)
    x = torch.randn(c["S"], c["B"], c["H"], dtype=torch.bfloat16, requires_grad=True)

    def full() -> None:
        y = layer(x)
        y.sum().backward()

    return full


# Activations and feed-forwards


def softmax(c: Configuration, mode: str, provider: str) -> Measured:
    x = torch.randn(c["N"], dtype=dtype_of(c), requires_grad=True)  # the script makes a vector, not M rows
    return in_mode(mode, lambda: F.softmax(x, dim=-1), torch.ones_like)


def relu_squared(c: Configuration, mode: str, provider: str) -> Measured:
    x = torch.randn(c["N"], dtype=dtype_of(c), requires_grad=True)  # likewise
    return in_mode(mode, lambda: torch.square(F.relu(x)), torch.ones_like)


def sparsemax(c: Configuration, mode: str, provider: str) -> Measured:
    x = torch.randn(c["B"] * c["T"], c["V"], dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)

    def forward() -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        places = torch.arange(1, x.size(-1) + 1, dtype=x.dtype).view(1, -1)
        bound = 1 + places * ordered
        support = bound > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        total = (ordered * support).sum(dim=-1, keepdim=True)
        threshold = (total - 1) / count
        return torch.clamp(x - threshold, min=0)

    return in_mode(mode, forward, lambda y: dy)


class FeedForward(nn.Module):
    """Llama's: `down(activation(gate(x)) * up(x))`."""

    def __init__(self, width: int, inner: int, activation: str, dtype: torch.dtype):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False, dtype=dtype)
        self.activation = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def feed_forward(c: Configuration, mode: str, provider: str) -> Measured:
    dtype = dtype_of(c)
    x = torch.randn(c.get("bsz", c.get("B")), c["T"], c["hidden_size"], dtype=dtype, requires_grad=True)
    layer = FeedForward(c["hidden_size"], c["intermediate_size"], c["hidden_act"], dtype)
    if provider == "deepspeed_tiled":
        return in_mode(mode, lambda: Tiled.apply(layer, x, c["num_shards"]), torch.randn_like)
    return in_mode(mode, lambda: layer(x), torch.randn_like)


class Tiled(torch.autograd.Function):
    """A feed-forward over a part of the sequence at a time, recomputed in backward, as DeepSpeed's TiledMLP does it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor, shards: int) -> Tensor:
        ctx.layer, ctx.shards = layer, shards
        ctx.save_for_backward(x)
        parts = list(torch.chunk(x, shards, dim=-2))
        with torch.no_grad():
            outputs = [layer(part) for part in parts]
        return torch.cat(outputs, dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_().view(-1, saved.shape[-1])
        incoming = gradients[0].view(-1, saved.shape[-1])
        into_x = torch.zeros_like(x)
        start = 0
        for part in list(torch.chunk(x, ctx.shards, dim=0)):
            part.requires_grad_()
            part = part.detach().requires_grad_()
            part.grad = into_x.narrow(0, start, len(part))
            with torch.enable_grad():
                output = ctx.layer(part)
            torch.autograd.backward(output, incoming.narrow(0, start, len(part)))
            start += len(part)
        return None, into_x.view(saved.shape), None


def megatron_swiglu(c: Configuration, mode: str, provider: str) -> Measured:
    x = torch.randn(c["S"], c["B"], 2 * c["ffn_local"], dtype=torch.bfloat16, requires_grad=True)

    def forward(y: Tensor) -> Tensor:
        left, right = torch.chunk(y, 2, -1)
        return F.silu(left) * right

    def full() -> None:
        x.grad = None
        y = forward(x)
        y.sum().backward()

    return full


class VocabularyParallelLoss(torch.autograd.Function):
    """Megatron-core's unfused `vocab_parallel_cross_entropy` on one card."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, target: Tensor) -> Tensor:
        logits = given.float()
        largest = torch.max(logits, dim=-1)[0]
        logits -= largest.unsqueeze(dim=-1)
        outside = (target < 0) | (target >= logits.shape[-1])
        inside = target.clone() - 0
        inside[outside] = 0
        rows = logits.view(-1, logits.shape[-1])
        flat = inside.view(-1)
        places = torch.arange(0, rows.shape[0])
        predicted = rows[places, flat].clone().contiguous().view_as(target)
        predicted[outside] = 0.0
        exponents = logits
        torch.exp(logits, out=exponents)
        total = exponents.sum(dim=-1)
        loss = torch.log(total) - predicted
        exponents.div_(total.unsqueeze(dim=-1))
        ctx.save_for_backward(exponents, outside, flat)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        softmax, outside, flat = ctx.saved_tensors
        into_given = softmax
        rows = into_given.view(-1, softmax.shape[-1])
        places = torch.arange(0, rows.shape[0])
        update = 1.0 - outside.view(-1).float()
        rows[places, flat] -= update
        into_given.mul_(gradient.unsqueeze(dim=-1))
        return into_given, None


def megatron_cross_entropy(c: Configuration, mode: str, provider: str) -> Measured:
    logits = torch.randn(c["S"], c["B"], c["V"], dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, c["V"], (c["S"], c["B"]))

    def full() -> None:
        logits.grad = None
        y = VocabularyParallelLoss.apply(logits, target)
        y.sum().backward()

    return full


def embedding(c: Configuration, mode: str, provider: str) -> Measured:
    layer, other = nn.Embedding(c["V"], c["D"]), nn.Embedding(c["V"], c["D"])
    ids = torch.randint(0, c["V"], (c["B"], c["T"]))

    def full() -> None:
        output = layer(ids)
        output.backward(torch.randn_like(output))

    return holding(full, other)


# Attention


def rope(c: Configuration, mode: str, provider: str) -> Measured:
    dtype, length = dtype_of(c), c.get("seq_len", c.get("T"))
    width = c.get("hidden_size", c.get("H")) // c["num_q_heads"]
    q, k = (
        torch.randn(1, length, heads, width, dtype=dtype, requires_grad=True).transpose(1, 2)
        for heads in (c["num_q_heads"], c["num_kv_heads"])
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length).unsqueeze(0)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width))
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    del angles

    def turned(x: Tensor) -> Tensor:
        left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-right, left), dim=-1)

    def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * c) + (turned(q) * s), (k * c) + (turned(k) * s)

    def full() -> None:
        outputs = forward(q, k)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return holding(full, positions, frequencies)


def llama4_rope(c: Configuration, mode: str, provider: str) -> Measured:
    dtype, length = dtype_of(c), c.get("seq_len", c.get("T"))
    width = c.get("hidden_size", c.get("H")) // c["num_q_heads"]
    q, k = (
        torch.randn(1, length, heads, width, dtype=dtype, requires_grad=True)
        for heads in (c["num_q_heads"], c["num_kv_heads"])
    )
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length).unsqueeze(0)
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, width, 2).float() / width))
    angles = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    del angles

    def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        q_out = torch.view_as_real(q_ * rotation[:, :, None, :]).flatten(3)
        k_out = torch.view_as_real(k_ * rotation[:, :, None, :]).flatten(3)
        return q_out.type_as(q), k_out.type_as(k)

    def full() -> None:
        outputs = forward(q, k)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return holding(full, positions, frequencies)


class Neighbourhood(nn.Module):
    """Eager attention with a mask of near positions."""

    def __init__(self, width: int, heads: int, bias: bool):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size, length, width = x.shape
        query, key, value = self.q(x), self.k(x), self.v(x)
        query = query.view(size, length, self.heads, -1).transpose(1, 2)
        key = key.view(size, length, self.heads, -1).transpose(1, 2)
        value = value.view(size, length, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * (1.0 / math.sqrt(width // self.heads))
        mask = torch.zeros(length, length, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        attended = torch.matmul(weights, value)
        attended = attended.transpose(1, 2).contiguous().view(size, length, width)
        return self.out(attended)


def fused_neighborhood_attention(c: Configuration, mode: str, provider: str) -> Measured:
    other, layer = (Neighbourhood(c["hidden_size"], c["num_heads"], c["bias"]) for _ in range(2))
    x = torch.randn(c["batch_size"], c["seq_len"], c["hidden_size"], dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return holding(in_mode(mode, lambda: layer(x), lambda y: dy), other)


# Experts


@functools.cache
def routing(tokens: int, experts: int, chosen: int, drawn_before: tuple[int, ...]) -> Tensor:
    """The experts of each token that seed 42 gives on an H100, after the tensors drawn before."""
    offset = 0
    for numel in drawn_before:
        offset = philox.offset_after(numel, H100_PROCESSORS, offset)
    logits = philox.randn(tokens * experts, 42, offset, H100_PROCESSORS).reshape(tokens, experts)
    best = np.argpartition(-logits, chosen - 1, axis=1)[:, :chosen]
    return torch.from_numpy(best.astype(np.int32))


def fused_moe(c: Configuration, mode: str, provider: str) -> Measured:
    tokens, experts, width, inner, chosen = c["T"], c["E"], c["H"], c["intermediate_dim"], c["K"]
    dtype = dtype_of(c)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    gate_up = torch.randn(experts, 2 * inner, width, dtype=dtype, requires_grad=True) * 0.02
    down = torch.randn(experts, width, inner, dtype=dtype, requires_grad=True) * 0.02
    index = routing(tokens, experts, chosen, (x.numel(), gate_up.numel(), down.numel()))
    weights = torch.softmax(torch.randn(tokens, chosen), dim=-1).to(dtype).requires_grad_(True)

    def forward() -> Tensor:
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(index.long(), num_classes=experts)
            mask = mask.permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert in hit:
            number = expert[0]
            place, token = torch.where(mask[number])
            current = x[token]
            gate, up = F.linear(current, gate_up[number]).chunk(2, dim=-1)
            current = F.silu(gate) * up
            current = F.linear(current, down[number])
            current = current * weights[token, place, None]
            final.index_add_(0, token, current.to(final.dtype))
        return final

    return in_mode(mode, forward, torch.randn_like)


OPERATORS: dict[str, Callable[[Configuration, str, str], Measured]] = {
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_jsd": fused_linear_jsd,
    "fused_moe": fused_moe,
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "geglu": feed_forward,
    "group_norm": group_norm,
    "jsd": jsd,
    "kl_div": kl_div,
    "layer_norm": layer_norm,
    "llama4_rope": llama4_rope,
    "megatron_cross_entropy": megatron_cross_entropy,
    "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu,
    "relu_squared": relu_squared,
    "rms_norm": rms_norm,
    "rope": rope,
    "softmax": softmax,
    "sparsemax": sparsemax,
    "swiglu": feed_forward,
    "tiled_geglu": feed_forward,
    "tiled_swiglu": feed_forward,
    "tvd": tvd,
}
