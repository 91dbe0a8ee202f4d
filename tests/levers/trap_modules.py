"""Blocks as people write them: attention, experts, recurrences, other signatures, and code that wraps a block."""

from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from trap_cases import WIDTH, same_parameters, share_blocks, side_loss, trap
from trap_state import Dropout, Mlp, SideOutput

from exactness import sum_of_squares

HEADS = 2


class Attention(nn.Module):
    mask: torch.Tensor | None = None
    causal = False
    dropout = 0.0

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal, dropout_p=self.dropout
        )
        hidden = self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        hidden += x
        return hidden


@trap("causal attention")
class Causal(Attention):
    causal = True


@trap("attention with a boolean mask")
class BooleanMask(Attention):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()


@trap("attention with a float mask and dropout")
class FloatMask(Attention):
    mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    dropout = 0.2


@trap("nn.MultiheadAttention")
class Multihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x, need_weights=True)
        self.weights = weights
        return x + mixed


@trap("nn.TransformerEncoderLayer")
def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True)


@trap("nn.TransformerDecoderLayer", call=lambda block, hidden: block(hidden, memory=hidden.flip(1)))
def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)


@trap("convolutions")
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.grouped = nn.GroupNorm(2, WIDTH)
        self.wide = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        mixed = F.silu(self.grouped(self.depthwise(x.transpose(1, 2))[..., : x.shape[1]]), inplace=True)
        image = F.max_pool2d(F.relu(self.wide(x.unsqueeze(1)), inplace=True), 2)
        spread = F.interpolate(image, scale_factor=2, mode="bilinear").mean(1)
        return x + mixed.transpose(1, 2) + spread


def recurrence(kind):
    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = kind(WIDTH, WIDTH // 2, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)

        def forward(self, x):
            return x + self.cells(x)[0].tanh()

    return Recurrence


trap("LSTM")(recurrence(nn.LSTM))
trap("GRU")(recurrence(nn.GRU))


class Experts(nn.Module):
    """Routed experts whose loop depends on the data, as MiniMind and others write it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = torch.nonzero(chosen == i, as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        load = F.one_hot(chosen, 4).float().mean((0, 1))
        self.aux = (load * scores.mean(0)).sum() * 4
        return x + out.view_as(x)


trap("routed experts", loss=side_loss)(Experts)
trap("routed experts in bf16 autocast", loss=lambda m, x: autocast_loss(m, x) + sum(b.aux for b in m.layers))(Experts)


@trap("one sorted product for all experts")
class SortedExperts(Experts):
    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat)
        best, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=4).tolist()
        parts = [e(part) for e, part in zip(self.experts, flat[order].split(counts), strict=True)]
        out = torch.empty_like(flat)
        out[order] = torch.cat(parts)
        return x + (out * best.sigmoid()[:, None]).view_as(x)


@trap("an embedding inside", call=lambda block, hidden: block(hidden, ids=torch.arange(12).view(2, 6) % 5))
class Embeds(Mlp):
    sparse = False

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, max_norm=1.0, sparse=self.sparse)

    def forward(self, x, *, ids):
        return x + self.second(F.silu(self.first(x * self.embedding(ids))))


@trap("sparse gradients of an embedding", call=lambda block, hidden: block(hidden, ids=torch.arange(12).view(2, 6) % 5))
class SparseEmbeds(Embeds):
    sparse = True


class Result(NamedTuple):
    hidden: torch.Tensor
    name: str


def signature(receive, respond=lambda y: y):
    class Signature(Dropout):
        def forward(self, *args, **kwargs):
            return respond(super().forward(receive(*args, **kwargs)))

    return Signature


trap("a tuple input", call=lambda b, h: b((h, h * 2)))(signature(lambda pair: pair[0] + pair[1]))
trap("a dict input", call=lambda b, h: b({"x": h, "scale": 2}))(signature(lambda d: d["x"] * d["scale"]))
trap("keyword inputs", call=lambda b, h: b(x=h, scale=h.mean()))(signature(lambda x, scale: x * scale))
trap("an object as input", call=lambda b, h: b(Box(h)))(signature(lambda box: box.content))
trap("a None output", call=lambda b, h: b(h)[0])(signature(lambda x: x, lambda y: (y, None)))
trap("non-tensor outputs", call=lambda b, h: b(h)["y"])(signature(lambda x: x, lambda y: {"y": y, "n": 3, "s": "a"}))
trap("a named tuple output", call=lambda b, h: b(h).hidden)(signature(lambda x: x, lambda y: Result(y, "block")))
trap("an object as output", call=lambda b, h: b(h).content)(signature(lambda x: x, lambda y: Box(y)))
trap("an object as output, written", call=lambda b, h: b(h).content.mul_(0.5))(signature(lambda x: x, lambda y: Box(y)))
trap("two outputs, one of them a view of the other", call=lambda b, h: (lambda y, z: y + z.sum())(*b(h)))(
    signature(lambda x: x, lambda y: (y, y[:, 0]))
)


class Box:
    """A container that PyTorch's trees do not look into."""

    def __init__(self, content: torch.Tensor):
        self.content = content


trap("shared blocks called twice", prepare=share_blocks)(Dropout)
trap("tied weights", prepare=same_parameters)(Mlp)


def autocast_loss(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return sum_of_squares(model, inputs)


def backward_in_autocast(loss):
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


trap("bf16 autocast", loss=autocast_loss)(Causal)
trap("bf16 autocast, tied weights", loss=autocast_loss, prepare=same_parameters)(Dropout)
trap("bf16 autocast, backward inside", loss=autocast_loss, backward=backward_in_autocast)(SideOutput)


@trap("autocast switched inside the block")
class SwitchesAutocast(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = F.silu(self.first(x))
            with torch.autocast("cpu", enabled=False):
                hidden = hidden.float().softmax(-1)
            hidden = self.second(hidden)
        return x + hidden


@trap("another default dtype inside the block")
class DefaultDtype(Mlp):
    def forward(self, x):
        torch.set_default_dtype(torch.float64)
        try:
            hidden = self.first(x) * (torch.ones(2 * WIDTH) / 3).float() + torch.rand(2 * WIDTH).float()
        finally:
            torch.set_default_dtype(torch.float32)
        return x + self.second(hidden.tanh())


@trap("gradients switched off and on inside")
class SwitchesGradients(Mlp):
    def forward(self, x):
        with torch.no_grad():
            base = self.first(x).tanh()
            with torch.enable_grad():
                moved = self.first(x).sin()
        with torch.inference_mode():
            frozen = self.first(x.detach()).cos()
        return x + self.second(base * moved + frozen.clone())


@trap("a checkpoint inside, not reentrant")
class InnerCheckpoint(Dropout):
    reentrant = False

    def forward(self, x):
        hidden = checkpoint(super().forward, x.tanh(), use_reentrant=self.reentrant)
        return x + self.second(F.dropout(self.first(hidden), 0.2))


@trap("a checkpoint inside, reentrant")
class InnerReentrant(InnerCheckpoint):
    reentrant = True


def called_by_checkpoint(reentrant):
    return lambda block, hidden: checkpoint(block, hidden, use_reentrant=reentrant)


trap("the block inside a checkpoint, not reentrant", call=called_by_checkpoint(False))(Dropout)
trap("the block inside a checkpoint, reentrant", call=called_by_checkpoint(True))(Dropout)
trap("experts inside a checkpoint", call=called_by_checkpoint(False))(Experts)


def hooked():
    block = Dropout()
    block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    block.register_forward_hook(lambda module, args, output: output.tanh() + args[0])
    block.first.register_forward_hook(lambda module, args, output: output * 0.9)
    block.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.7,))
    block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.1,))
    block.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.1,))
    return block


trap("hooks that change inputs, outputs and gradients")(hooked)


@trap("a hook on an intermediate result")
class TensorHook(Mlp):
    def forward(self, x):
        hidden = self.first(x).tanh()
        hidden.register_hook(lambda gradient: gradient * 0.5)
        hidden.retain_grad()
        out = x + self.second(hidden.sin())
        out.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return out


def hook_parameters(model):
    def halve(parameter):
        parameter.grad *= 0.5

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(halve)


trap("hooks on parameters", prepare=hook_parameters)(Dropout)


def step_in_backward(model):
    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


trap("parameters stepped in backward", prepare=step_in_backward)(Mlp)


@trap("a gradient taken inside the forward")
class GradientInside(Mlp):
    def forward(self, x):
        with torch.enable_grad():
            energy = self.first(x).tanh().pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.second(F.silu(self.first(force.sin())))


class Square(torch.autograd.Function):
    """Saves its input, keeps another tensor as an attribute and writes a third in place."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        ctx.doubled = x * 2
        y.mul_(0.5)
        ctx.mark_dirty(y)
        return x * x, y

    @staticmethod
    def backward(ctx, gradient, other):
        (x,) = ctx.saved_tensors
        return gradient * (ctx.doubled + 0 * x), other * 0.5


@trap("a function of the user's own")
class OwnFunction(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        squared, halved = Square.apply(hidden.sin(), hidden.cos())
        return x + self.second((squared + halved).tanh())


@torch.library.custom_op("tightfit_traps::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """An operator of another library that draws from numpy, which nobody can know."""
    return x * torch.from_numpy(numpy.random.rand(*x.shape).astype("float32"))


noisy.register_autograd(lambda ctx, gradient: gradient * 0.5)


@trap("an operator of another library")
class ForeignOperator(Mlp):
    def forward(self, x):
        return x + self.second((noisy(self.first(x)) * 2).tanh())


@trap("vmap")
class Vmapped(Mlp):
    def forward(self, x):
        bent = torch.vmap(lambda row: (row * row.sum()).sin())(self.norm(x))
        return x + self.second(F.silu(self.first(bent)))


@trap("einsum, cumsum and friends")
class Assorted(Mlp):
    def forward(self, x):
        mixed = torch.einsum("btd,bsd->bts", x, x).cumsum(-1).logsumexp(-1, keepdim=True)
        top = x.sort(-1).values * x.cummax(1).values + torch.cdist(x, x).sum(-1, keepdim=True)
        return x + self.second(self.first(mixed + top).square().log1p().sqrt()) + x.std(-1, keepdim=True) + x.norm()
