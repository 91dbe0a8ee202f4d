"""Blocks of one operation or several, of kinds that `random_blocks.py` has not: state, own autograd, layers, dtypes.

A `Piece` makes what it needs in its block, and computes a tensor like its two operands (samples, positions, WIDE).
"""

import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDE = 16
POSITIONS = 6


class Piece(NamedTuple):
    """What a block may do: a function of the block, two tensors and what travels with the blocks, and its modules."""

    run: Callable[["WiderBlock", Tensor, Tensor, dict[str, Any]], Tensor]
    make: Callable[[], Mapping[str, nn.Module | nn.Parameter | Tensor]] = dict


class Squared(torch.autograd.Function):
    """A function of one's own, with saved tensors and a number."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.factor = factor
        return a * b * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b * ctx.factor, gradient * a * ctx.factor, None


class WrittenInPlace(torch.autograd.Function):
    """A function of one's own that writes into its input."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        a.mul_(0.5)
        ctx.mark_dirty(a)
        return a

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 0.5


class TwoResults(torch.autograd.Function):
    """A function of one's own with two results, of which one has no gradient, that keeps a tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        values, places = a.sort(-1)
        ctx.places = places
        ctx.mark_non_differentiable(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Any:
        return torch.zeros_like(gradient).scatter(-1, ctx.places, gradient)


def _statistics_in_place(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        block.mean.mul_(0.9).add_(a.detach().mean((0, 1)), alpha=0.1)
        block.count += 1
    return a - block.mean


def _statistics_by_copy(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    block.mean.copy_(a.detach().std((0, 1)))
    return a * block.mean.clone()


def _written_below(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    made = block.linear(a)
    made.add_(b)
    return made.relu_()


def _assigned(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    made = a.clone()
    made[..., :3] = b[..., :3] * 2
    made[:, 0].zero_()
    return made


def _filled(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    out = torch.empty(a.shape)
    out[: len(a) // 2] = a[: len(a) // 2].tanh()
    out[len(a) // 2 :] = b[len(a) // 2 :]
    return out


def _cache(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    carried["cache"].append(block.linear(a))
    return torch.stack(carried["cache"][-2:]).mean(0) * b


def _grown(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    past = carried.get("past")
    carried["past"] = a if past is None else torch.cat([past, a], 1)
    return F.scaled_dot_product_attention(b, carried["past"], carried["past"])


def _popped(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    before = carried["cache"].pop() if carried["cache"] else b
    carried["cache"].append(a.square())
    return before * a


def _remembered(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    block.last = a.detach().mean((0, 1))
    return a + b


def _auxiliary(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    carried["losses"].append(block.linear(a).square().mean())
    return a * b


def _energy(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.enable_grad():
        held = a if a.requires_grad else a.detach().requires_grad_()
        energy = block.linear(held).tanh().square().sum()
        (force,) = torch.autograd.grad(energy, held, create_graph=True)
    return a - 0.1 * force


def _score(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.enable_grad():
        held = a.detach().requires_grad_()
        (force,) = torch.autograd.grad(block.linear(held).tanh().sum(), held)
    return a * force


def _autocast(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        made = block.linear(a) @ b.transpose(-1, -2)
    return (made.float() @ a).tanh()


def _no_autocast(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.linear(a.float()).tanh()


def _complex(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    pairs = torch.view_as_complex(a.float().reshape(*a.shape[:-1], WIDE // 2, 2).contiguous())
    turns = torch.polar(torch.ones(WIDE // 2), torch.arange(WIDE // 2) / 3)
    return torch.view_as_real(pairs * turns).flatten(-2)


def _own_checkpoint(reentrant: bool) -> Callable[..., Tensor]:
    def run(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
        return checkpoint(lambda a, b: F.gelu(block.linear(a)) * b, a, b, use_reentrant=reentrant)

    return run


def _own_checkpoints_nested(reentrant: bool) -> Callable[..., Tensor]:
    def run(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
        def inner(a: Tensor) -> Tensor:
            with torch.no_grad():
                scale = block.linear(a).amax()
            return block.linear(a).tanh() / (1 + scale.abs())

        return checkpoint(lambda a: checkpoint(inner, a, use_reentrant=reentrant) * b, a, use_reentrant=False)

    return run


def _tensor_hook(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    made = block.linear(a)
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient.clamp(-1, 1) * 0.5)
    return made * b


def _on_host(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return (a * b).tanh() * a


def _recurrent(kind: str) -> Callable[..., Tensor]:
    return lambda block, a, b, carried: getattr(block, kind)(a)[0]


def _joined(block: "WiderBlock", a: Tensor, b: Tensor, carried: dict[str, Any]) -> Tensor:
    return block.fold(block.linear(a).unflatten(-1, (4, 4))).flatten(2)


def _linear(**settings: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"linear": nn.Linear(WIDE, WIDE, **settings)}


def _statistics() -> Mapping[str, Any]:
    return {"mean": torch.zeros(WIDE), "count": torch.zeros((), dtype=torch.long)}


def _changed(change: Callable[[nn.Linear], nn.Module], name: str) -> Piece:
    return Piece(lambda block, a, b, carried: getattr(block, name)(a), lambda: {name: change(nn.Linear(WIDE, WIDE))})


def _layer(name: str, build: Callable[[], nn.Module], run: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Piece:
    return Piece(lambda block, a, b, carried: run(getattr(block, name), a, b), lambda: {name: build()})


def _turned(layer: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    return layer(a.transpose(1, 2)).transpose(1, 2)


def _frozen(layer: nn.Linear, *names: str) -> nn.Linear:
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def _strided(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(torch.randn(WIDE, 2 * WIDE)[:, ::2] * 0.2)
    return layer


def _turned_weight(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter((torch.randn(WIDE, WIDE) * 0.2).t())
    return layer


def _plain(function: Callable[[Tensor, Tensor], Tensor]) -> Piece:
    return Piece(lambda block, a, b, carried: function(a, b))


def _with_linear(function: Callable[["WiderBlock", Tensor, Tensor, dict[str, Any]], Tensor]) -> Piece:
    return Piece(function, _linear())


PIECES: dict[str, Piece] = {
    "linear": _with_linear(lambda block, a, b, carried: block.linear(a)),
    "product": _plain(lambda a, b: a * b),
    "gelu": _plain(lambda a, b: F.gelu(a)),
    # State
    "statistics in place": Piece(_statistics_in_place, _statistics),
    "statistics by copy": Piece(_statistics_by_copy, _statistics),
    "batch norm": _layer("batch_norm", lambda: nn.BatchNorm1d(WIDE), _turned),
    "remembered": Piece(_remembered),
    "cache": _with_linear(_cache),
    "grown cache": Piece(_grown),
    "popped cache": Piece(_popped),
    "auxiliary loss": _with_linear(_auxiliary),
    "spectral norm": _changed(parametrizations.spectral_norm, "spectral"),
    "dropout": Piece(lambda block, a, b, carried: F.dropout(a, 0.2, block.training)),
    # Writes
    "written below": _with_linear(_written_below),
    "assigned": Piece(_assigned),
    "filled": Piece(_filled),
    "masked in place": _plain(lambda a, b: (a * 1).masked_fill_(b > 0, 0.5)),
    "gradient cut in place": _plain(lambda a, b: (a * b).detach_() + a),
    # Autograd of its own
    "own function": Piece(lambda block, a, b, carried: Squared.apply(a, b, 0.5)),
    "own function in place": Piece(lambda block, a, b, carried: WrittenInPlace.apply(a + b)),
    "own function of two": Piece(lambda block, a, b, carried: TwoResults.apply(a)[0] * b),
    "energy": _with_linear(_energy),
    "score": _with_linear(_score),
    "own checkpoint": _with_linear(_own_checkpoint(False)),
    "own reentrant checkpoint": _with_linear(_own_checkpoint(True)),
    "own checkpoints nested": _with_linear(_own_checkpoints_nested(False)),
    "own reentrant checkpoint nested": _with_linear(_own_checkpoints_nested(True)),
    "tensor hook": _with_linear(_tensor_hook),
    "packed": Piece(_on_host),
    "vmap": _with_linear(lambda block, a, b, carried: torch.func.vmap(lambda row: block.linear(row).tanh())(a)),
    "forward mode": _with_linear(
        lambda block, a, b, carried: torch.func.jvp(lambda x: block.linear(x).tanh(), (a,), (b,))[1]
    ),
    "functional call": _with_linear(
        lambda block, a, b, carried: torch.func.functional_call(
            block.linear, {"weight": block.linear.weight * 0.5}, (a,)
        )
    ),
    # Layers
    "convolution": _layer("conv", lambda: nn.Conv1d(WIDE, WIDE, 3, padding=1), _turned),
    "depthwise": _layer("depthwise", lambda: nn.Conv1d(WIDE, WIDE, 3, padding=1, groups=WIDE), _turned),
    "transposed convolution": _layer("up", lambda: nn.ConvTranspose1d(WIDE, WIDE, 3, padding=1), _turned),
    "flat convolution": Piece(_joined, lambda: {"fold": nn.Conv2d(6, 6, 3, padding=1), **_linear()()}),
    "embedding": _layer(
        "table", lambda: nn.Embedding(WIDE, WIDE), lambda layer, a, b: layer(a.detach().argmax(-1)) * b
    ),
    "recurrent": Piece(_recurrent("rnn"), lambda: {"rnn": nn.RNN(WIDE, WIDE, batch_first=True)}),
    "gated recurrent": Piece(_recurrent("gru"), lambda: {"gru": nn.GRU(WIDE, WIDE, batch_first=True)}),
    "long memory": Piece(_recurrent("lstm"), lambda: {"lstm": nn.LSTM(WIDE, WIDE, batch_first=True)}),
    "attention layer": _layer(
        "attention", lambda: nn.MultiheadAttention(WIDE, 2, batch_first=True), lambda layer, a, b: layer(a, b, b)[0]
    ),
    "attention without weights": _layer(
        "heads",
        lambda: nn.MultiheadAttention(WIDE, 2, batch_first=True),
        lambda layer, a, b: layer(a, a, a, need_weights=False)[0],
    ),
    "encoder layer": _layer(
        "encoder", lambda: nn.TransformerEncoderLayer(WIDE, 2, 32, 0.1, batch_first=True), lambda layer, a, b: layer(a)
    ),
    "group norm": _layer("group", lambda: nn.GroupNorm(4, WIDE), _turned),
    "instance norm": _layer("instance", lambda: nn.InstanceNorm1d(WIDE, affine=True), _turned),
    "learnt slope": _layer("slope", lambda: nn.PReLU(WIDE), _turned),
    "bilinear": _layer("bilinear", lambda: nn.Bilinear(WIDE, WIDE, WIDE), lambda layer, a, b: layer(a, b)),
    "weight norm": _changed(parametrizations.weight_norm, "normed"),
    "orthogonal": _changed(parametrizations.orthogonal, "turning"),
    "frozen": _changed(lambda layer: _frozen(layer, "weight", "bias"), "frozen"),
    "frozen bias": _changed(lambda layer: _frozen(layer, "bias"), "half_frozen"),
    "strided weight": _changed(_strided, "strided"),
    "turned weight": _changed(_turned_weight, "turned"),
    # Dtypes
    "autocast": _with_linear(_autocast),
    "no autocast": _with_linear(_no_autocast),
    "double": _with_linear(
        lambda block, a, b, carried: F.linear(a.double(), block.linear.weight.double()).tanh().to(b.dtype)
    ),
    "half": _plain(lambda a, b: (a.half() * b.half()).tanh().to(a.dtype)),
    "rotation": Piece(_complex),
    "spectrum": _plain(lambda a, b: torch.fft.irfft(torch.fft.rfft(a.float()) * torch.fft.rfft(b.float()), n=WIDE)),
    "complex product": _plain(lambda a, b: (torch.complex(a.float(), b.float()) ** 2).abs()),
    # Indices, sorts and shapes
    "sort": _plain(lambda a, b: a.sort(-1).values * b),
    "largest": _plain(lambda a, b: a.scatter(-1, b.topk(3, -1).indices, 1.0)),
    "gathered": _plain(lambda a, b: a.gather(-1, b.detach().argsort(-1))),
    "added by index": _plain(lambda a, b: a.index_add(1, torch.tensor([0, 2, 0]), b[:, :3])),
    "added by places": _plain(lambda a, b: a.index_put((torch.arange(3),), b[:3].sigmoid(), accumulate=True)),
    "running sum": _plain(lambda a, b: a.cumsum(1) * b.cumprod(-1)),
    "einsum": _plain(lambda a, b: torch.einsum("nlw,nmw,nmv->nlv", a, b, a).tanh()),
    "windows": _plain(lambda a, b: F.pad(a, (0, 0, 1, 1)).unfold(1, 3, 1).amax(-1)),
    "rolled": _plain(lambda a, b: a.roll(1, 1) - b.flip(1)),
    "pooled": _plain(lambda a, b: F.max_pool1d(F.pad(a.transpose(1, 2), (1, 1)), 3, 1).transpose(1, 2)),
    "resized": _plain(
        lambda a, b: F.interpolate(a.transpose(1, 2), 3, mode="linear").repeat_interleave(2, -1).transpose(1, 2) * b
    ),
    "gated": _plain(lambda a, b: F.glu(torch.cat([a, b], -1), -1)),
    "distances": _plain(lambda a, b: torch.cdist(a, b) @ b),
    "norms": _plain(lambda a, b: a / (1 + a.norm(dim=-1, keepdim=True)) + F.normalize(b, dim=-1)),
    "where": _plain(lambda a, b: torch.where(a > b, a, b.exp().clamp(max=2))),
    "spread": _plain(lambda a, b: (a - a.mean((0, 1), keepdim=True)) / (a.std((0, 1), keepdim=True) + 1)),
    "largest sums": _plain(lambda a, b: a - a.logsumexp(-1, keepdim=True) + b.var(-1, keepdim=True)),
    "split": _plain(lambda a, b: torch.cat([part * b[..., :4] for part in a.split(4, -1)], -1)),
    "unbound": _plain(lambda a, b: torch.stack([row.tanh() for row in a.unbind(1)], 1)),
    "expanded": _plain(lambda a, b: (a.mean(1, keepdim=True).expand_as(b) * b).reshape(a.shape)),
}


MOVED = {"remembered", "cache", "grown cache", "popped cache", "auxiliary loss"}  # state of Python, not buffers


class WiderBlock(nn.Module):
    """A block that does some pieces over the tensors made so far. A subclass draws its `steps` once."""

    steps: tuple[tuple[str, float, float], ...]

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDE, WIDE)
        for name, _, _ in self.steps:
            for own, made in PIECES[name].make().items():
                if hasattr(self, own):
                    continue
                if isinstance(made, nn.Module | nn.Parameter):
                    setattr(self, own, made)
                else:
                    self.register_buffer(own, made)

    def run(self, stream: Tensor, condition: Tensor, carried: dict[str, Any]) -> Tensor:
        values = [stream, condition, stream]
        for name, first, second in self.steps:
            a, b = (values[int(place * len(values))] for place in (first, second))
            values.append(PIECES[name].run(self, a, b, carried))
        return stream + self.out(values[-1]).tanh() + 0.1 * values[-2]

    def forward(self, stream: Tensor, condition: Tensor, carried: dict[str, Any]) -> Tensor:
        return self.run(stream, condition, carried)


@dataclass
class Held:
    """A block's results as a dataclass."""

    stream: Tensor
    mean: Tensor


class Pair(NamedTuple):
    """A block's results as a named tuple."""

    stream: Tensor
    mean: Tensor


def _keywords(self: WiderBlock, *, stream: Tensor, condition: Tensor, carried: dict[str, Any]) -> Tensor:
    return self.run(stream, condition, carried)


def _one_dict(self: WiderBlock, given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "stream": self.run(given["stream"], given["condition"], given["carried"])}


def _in_a_dict(block: nn.Module, x: Tensor, c: Tensor, carried: dict[str, Any]) -> Any:
    return block({"stream": x, "condition": c, "carried": carried})


def _written_input(self: WiderBlock, stream: Tensor, condition: Tensor, carried: dict[str, Any]) -> Tensor:
    stream.mul_(0.9)
    return self.run(stream * 1, condition, carried)


def _written_result(self: WiderBlock, stream: Tensor, condition: Tensor, carried: dict[str, Any]) -> Tensor:
    stream += self.run(stream * 1, condition, carried)
    return stream


# How a block takes its operands and gives its results: its forward, and how the net calls it.
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "positional": (WiderBlock.forward, lambda block, x, c, carried: block(x, c, carried)),
    "keywords": (_keywords, lambda block, x, c, carried: block(stream=x, condition=c, carried=carried)),
    "a dict": (_one_dict, lambda block, x, c, carried: _in_a_dict(block, x, c, carried)["stream"]),
    "a dataclass": (
        lambda self, x, c, carried: (lambda y: Held(y, y.mean()))(self.run(x, c, carried)),
        lambda block, x, c, carried: (lambda held: held.stream * (1 + held.mean))(block(x, c, carried)),
    ),
    "a named tuple": (
        lambda self, x, c, carried: (lambda y: Pair(y, y.mean()))(self.run(x, c, carried)),
        lambda block, x, c, carried: block(x, c, carried).stream,
    ),
    "a list": (
        lambda self, x, c, carried: [self.run(x, c, carried), x, None, "text"],
        lambda block, x, c, carried: (lambda found: found[0] + 0.1 * found[1])(block(x, c, carried)),
    ),
    "its input written": (_written_input, lambda block, x, c, carried: block(x * 1, c, carried)),
    "its result written": (
        WiderBlock.forward,
        lambda block, x, c, carried: block(x, c, carried).mul_(0.9).add_(0.1),
    ),
    "the stream in place": (_written_result, lambda block, x, c, carried: block(x * 1, c, carried)),
    "views": (
        lambda self, x, c, carried: self.run(x, c, carried).transpose(1, 2),
        lambda block, x, c, carried: block(x, c, carried).transpose(1, 2),
    ),
    "nested": (
        lambda self, given: ({"x": (self.run(*given[0], given[1]),)},),
        lambda block, x, c, carried: block([(x, c), carried])[0]["x"][0],
    ),
}

Order = Callable[[nn.ModuleList, Callable[[nn.Module, Tensor], Tensor], Tensor], Tensor]


def _in_order(blocks: Iterable[nn.Module], call: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
    for block in blocks:
        x = call(block, x)
    return x


def _with_skips(blocks: nn.ModuleList, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
    left = []
    for block in blocks:
        left.append(x)
        x = call(block, x)
    for before in reversed(left):
        x = x * 0.5 + before
    return x


def _halved(blocks: nn.ModuleList, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
    for block in blocks:
        with torch.no_grad():
            call(block, x)
        x = call(block, x)
    return x


ORDERS: dict[str, Order] = {
    "once": _in_order,
    "each twice": lambda blocks, call, x: _in_order([b for block in blocks for b in (block, block)], call, x),
    "all twice": lambda blocks, call, x: _in_order([*blocks, *blocks], call, x),
    "there and back": lambda blocks, call, x: _in_order([*blocks, *list(blocks)[::-1]], call, x),
    "beside each other": lambda blocks, call, x: torch.stack([call(block, x) for block in blocks]).mean(0),
    "with skips": _with_skips,
    "first without gradients": _halved,
    "one left out": lambda blocks, call, x: _in_order(list(blocks)[:-1], call, x),
}


def _hooked(block: WiderBlock) -> None:
    block.register_forward_hook(lambda module, args, out: out * 1.5 if isinstance(out, Tensor) else None)


def _hooked_before(block: WiderBlock) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, kwargs

    block.register_forward_pre_hook(before, with_kwargs=True)


def _hooked_backward(block: WiderBlock) -> None:
    def after(module: nn.Module, into: Any, outof: Any) -> Any:
        return tuple(None if each is None else each * 0.5 for each in into)

    block.out.register_full_backward_hook(after)


def _hooked_weight(block: WiderBlock) -> None:
    if block.out.weight.requires_grad:
        block.out.weight.register_hook(lambda gradient: gradient * 2)


def _hooked_within(block: WiderBlock) -> None:
    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        module.seen = out.detach().amax((0, 1))

    block.out.register_forward_hook(keep)


HOOKS: dict[str, Callable[[WiderBlock], None]] = {
    "none": lambda block: None,
    "after": _hooked,
    "before": _hooked_before,
    "backward": _hooked_backward,
    "of a weight": _hooked_weight,
    "within": _hooked_within,
}


def _tied(net: "WiderNet") -> None:
    for block in list(net.blocks)[1:]:
        block.out.weight = net.blocks[0].out.weight


def _tied_to_head(net: "WiderNet") -> None:
    for block in net.blocks:
        block.out.weight = net.head.weight


def _one_block(net: "WiderNet") -> None:
    for place in range(1, len(net.blocks)):
        net.blocks[place] = net.blocks[0]


def _first_frozen(net: "WiderNet") -> None:
    net.begin.requires_grad_(False)
    net.blocks[0].requires_grad_(False)


def _blocks_frozen(net: "WiderNet") -> None:
    for block in net.blocks:
        block.requires_grad_(False)
        block.out.bias.requires_grad_(True)


def _half_evaluated(net: "WiderNet") -> None:
    net.blocks[1].eval()


WEIGHTS: dict[str, Callable[["WiderNet"], None]] = {
    "all": lambda net: None,
    "tied": _tied,
    "tied to the head": _tied_to_head,
    "one block": _one_block,
    "first frozen": _first_frozen,
    "biases alone": _blocks_frozen,
    "one evaluated": _half_evaluated,
}

AROUND: dict[str, Callable[["WiderNet", Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "nothing": lambda net, run, x: run(x),
    "autocast": lambda net, run, x: _under(torch.autocast("cpu", torch.bfloat16), run, x).float(),
    "anomaly": lambda net, run, x: _under(torch.autograd.set_detect_anomaly(True, check_nan=False), run, x),
    "saved in bf16": lambda net, run, x: _under(
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.dtype, t.bfloat16() if t.is_floating_point() else t), lambda held: held[1].to(held[0])
        ),
        run,
        x,
    ),
    "on the host": lambda net, run, x: _under(torch.autograd.graph.save_on_cpu(), run, x),
    "a checkpoint": lambda net, run, x: checkpoint(run, x, use_reentrant=False),
    "a frozen beginning": lambda net, run, x: run(_under(torch.no_grad(), net.begin, x)),
}


def _under(context: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with context or nullcontext():
        return run(x)


@dataclass
class Drawn:
    """What a program is: a name of each table, and the pieces of its blocks with the places of their operands."""

    steps: tuple[tuple[str, float, float], ...]
    form: str = "positional"
    order: str = "once"
    hooks: str = "none"
    weights: str = "all"
    around: str = "nothing"

    @classmethod
    def of(cls, draw: random.Random, plain: float = 0.4) -> "Drawn":
        """Drawn; each axis beside the pieces is as usual with the probability `plain`."""
        names = [draw.choice(list(PIECES)) for _ in range(draw.randint(1, 4))]
        steps = tuple((name, draw.random(), draw.random()) for name in names)
        tables = {"form": FORMS, "order": ORDERS, "hooks": HOOKS, "weights": WEIGHTS, "around": AROUND}
        found = cls(steps, **{k: draw.choice(list(t)) for k, t in tables.items() if draw.random() > plain})
        if found.around == "a checkpoint" and MOVED.intersection(names):
            found.around = (
                "nothing"  # the plain run moves state twice there, blocks under a lever once, which no operator shows
            )
        return found

    def __str__(self) -> str:
        rest = {k: v for k, v in vars(self).items() if k != "steps" and v != vars(Drawn)[k]}
        pieces = ", ".join(f"{name}({first:.2f}, {second:.2f})" for name, first, second in self.steps)
        return f"{pieces}; " + ", ".join(f"{key} {value}" for key, value in rest.items())


class WiderNet(nn.Module):
    """Three blocks of one kind between two layers. Gives its result, and the sum of what blocks leave as losses."""

    def __init__(self, drawn: Drawn):
        super().__init__()
        forward, self.call = FORMS[drawn.form]
        kind = type("WiderDrawn", (WiderBlock,), {"steps": drawn.steps, "forward": forward})
        self.order, self.around = ORDERS[drawn.order], AROUND[drawn.around]
        self.condition, self.begin = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.head = nn.Linear(WIDE, WIDE)
        WEIGHTS[drawn.weights](self)
        for block in dict.fromkeys(self.blocks):
            HOOKS[drawn.hooks](block)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        carried: dict[str, Any] = {"cache": [], "losses": []}
        condition = self.condition(x)

        def features(x: Tensor) -> Tensor:
            return self.order(self.blocks, lambda block, x: self.call(block, x, condition, carried), self.begin(x))

        x = self.around(self, features, x)
        return self.head(x.to(self.head.weight.dtype)), sum(carried["losses"], torch.zeros(()))
