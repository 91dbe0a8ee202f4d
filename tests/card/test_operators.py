"""What single operators allocate on a card: PyTorch's own allocator against the rules of `tightfit.tracing.cuda`.

Needs PyTorch's CUDA build with a card, which may be one that computes nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.ops.weights.low_bit import freeze_in_low_bits
from tightfit.runtime.operators import tensors_among
from tightfit.tracing.cuda.allocator import RESULT, round_size
from tightfit.tracing.cuda.role import CudaRole
from tightfit.tracing.shapes import TensorShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's CUDA build and a card")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((8, 64), (2048, 512), (100_000, 64), (3, 5000))
ATTENTION = ((2, 4, 128, 64), (1, 8, 512, 64), (2, 8, 77, 80), (1, 2, 2048, 128), (1, 4, 256, 256))


class Allocations(TorchDispatchMode):
    """Compares the blocks that each operator allocates, in order, with the rule for it."""

    def __init__(self, role: CudaRole):
        super().__init__()
        self.role = role
        self.seen = 0
        self.other: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        torch.cuda.memory._record_memory_history(max_entries=100_000, context=None)
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            events = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        real = blocks_of(events)
        shapes, results = ([TensorShape.of(t) for t in tensors_among(each)] for each in ((args, kwargs or {}), (out,)))
        constants = tuple(a for a in args if not isinstance(a, torch.Tensor))
        rule = list(self.role.workspace(str(func), shapes, results, constants).blocks)
        rule = [RESULT] * (real.count(RESULT) - rule.count(RESULT)) + rule
        while rule.count(RESULT) > real.count(RESULT):  # results in the host's memory, or none
            rule.remove(RESULT)
        while rule and rule[-1] < 0:
            rule.pop()
        self.seen += 1
        if rule != real:
            self.other.append(f"{func}: {real} allocated, {rule} by the rule")
        return out


def blocks_of(events: list[dict[str, Any]]) -> list[int]:
    """The blocks of one operator as in `Scratch.blocks`, without those that it frees at its end."""
    live: dict[int, int] = {}
    found: list[int] = []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = len(found)
            found.append(round_size(event["size"]))
        elif event["action"] == "free_completed":
            found.append(-found[live.pop(event["addr"])])
    for place in live.values():
        found[place] = RESULT
    return list(reversed([*itertools.dropwhile(lambda size: size < 0, reversed(found))]))


def tensor(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="cuda", requires_grad=dtype.is_floating_point)


def places(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cuda")


def attention(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for batch, heads, length, width in ATTENTION:
        shape = (batch, heads, length, width)
        bias = torch.empty(length, length, dtype=dtype, device="cuda")
        for options in ({}, {"dropout_p": 0.1}, {"is_causal": True}, {"attn_mask": bias}):
            yield lambda shape=shape, options=options: F.scaled_dot_product_attention(
                *(tensor(*shape, dtype=dtype) for _ in range(3)), **options
            )
        few = (batch, heads // 2, length, width)
        yield lambda shape=shape, few=few: F.scaled_dot_product_attention(
            tensor(*shape, dtype=dtype), tensor(*few, dtype=dtype), tensor(*few, dtype=dtype), enable_gqa=True
        )
        if dtype.itemsize == 2 and width <= 128:
            for keys in (shape, few, (batch, 1, length, width)):
                yield lambda shape=shape, keys=keys: by_cudnn(tensor(*shape, dtype=dtype), tensor(*keys, dtype=dtype))


def by_cudnn(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Attention by the library that cards of capability 9 and 10 prefer."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, torch.empty_like(key), enable_gqa=True)


def by_rows(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for rows, columns in SIZES:
        x, weight = (lambda r=rows, c=columns: tensor(r, c, dtype=dtype)), (lambda c=columns: tensor(c, dtype=dtype))
        yield lambda x=x, w=weight, c=columns: F.layer_norm(x(), (c,), w(), w())
        yield lambda x=x, w=weight, c=columns: F.rms_norm(x(), (c,), w())
        yield lambda x=x: F.softmax(x(), -1)
        yield lambda r=rows, c=columns: F.log_softmax(tensor(c, r, dtype=dtype).t(), -1)
        yield lambda x=x, r=rows: F.cross_entropy(x(), places(r))
        yield lambda x=x: x().logsumexp(-1)
        yield lambda x=x: F.dropout(x(), 0.1)
        for reduced in ("sum", "mean", "amax", "var"):
            yield lambda x=x, name=reduced: getattr(x(), name)(0)
        for reduced in ("sum", "max", "std"):
            yield lambda x=x, name=reduced: getattr(x(), name)()
        yield lambda x=x: (x() > 0).any()
        yield lambda x=x: (x() > 0).sum(0)
        yield lambda x=x: torch._foreach_norm([x().detach(), x().detach()])[0].requires_grad_()


def by_places(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for count, rows, width in ((100, 1000, 64), (2048, 32_000, 512), (3072, 100, 64)):
        for padding in (None, 0):
            yield lambda n=count, r=rows, w=width, p=padding: F.embedding(places(n), tensor(r, w, dtype=dtype), p)
        yield lambda n=count: places(n).cumsum(0)
        yield lambda n=count: places(n).int().cumsum(0, dtype=torch.int32)
        yield lambda n=count: places(n).sort()
    # Of many places, the number of runs is read from the card.
    yield lambda: F.embedding(places(100)[None].expand(4, -1), tensor(1000, 64, dtype=dtype))


def products(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for m, k, n in ((64, 64, 64), (512, 1024, 256), (1, 512, 512)):
        yield lambda m=m, k=k, n=n: F.linear(*(tensor(*s, dtype=dtype) for s in ((m, k), (n, k), (n,)))).sum()
        yield lambda m=m, k=k, n=n: tensor(3, m, k, dtype=dtype) @ tensor(3, k, n, dtype=dtype)


def in_layouts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Tensors of the sizes of x: contiguous, the last dimensions turned, channels last, one number expanded."""
    yield x
    yield torch.empty_like(x.mT.contiguous()).mT
    if x.dim() == 4:
        yield x.to(memory_format=torch.channels_last)
    yield x.new_empty(1).expand_as(x)


def layouts(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Operators on inputs and gradients in every layout."""
    image, row = (2, 32, 16, 16), (2, 64, 100)
    channel, last, conv, each = (tensor(*s, dtype=dtype) for s in ((32,), (16,), (64, 32, 3, 3), (32, 1, 3, 3)))
    of_row, each_of_row = (tensor(*s, dtype=dtype) for s in ((48, 64, 3), (64, 1, 3)))
    operators: list[tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = [
        (image, lambda x: F.layer_norm(x, (16,), last, last)),
        (image, lambda x: F.rms_norm(x, (16,), last)),
        (image, lambda x: F.group_norm(x, 8, channel, channel)),
        (image, lambda x: F.softmax(x, -1)),
        (image, lambda x: F.log_softmax(x, -1)),
        (image, lambda x: F.conv2d(x, conv, torch.empty_like(conv[:, 0, 0, 0]), padding=1)),
        (image, lambda x: F.conv2d(x, conv.detach(), padding=1)),
        (image, lambda x: F.conv2d(x.detach(), conv, padding=1)),
        (image, lambda x: F.conv_transpose2d(x, conv.transpose(0, 1).contiguous(), padding=1)),
        (image, lambda x: F.conv2d(x, each, channel, groups=32)),
        (row, lambda x: F.conv1d(x, of_row, padding=1)),
        (row, lambda x: F.conv1d(x, each_of_row, groups=64)),
        (image, lambda x: F.avg_pool2d(x, 2)),
        (image, lambda x: F.max_pool2d(x, 2)),
        (image, lambda x: F.adaptive_avg_pool2d(x, 2)),
        (image, lambda x: F.interpolate(x, scale_factor=2.0)),
    ]
    for sizes, operator in operators:
        for source in in_layouts(torch.empty(sizes, dtype=dtype, device="cuda")):
            for gradient in in_layouts(operator(source).detach()):
                yield lambda x=source, g=gradient, f=operator: f(x.detach().requires_grad_()).backward(g)


def losses(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    elementwise = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.l1_loss)
    for loss, reduction in itertools.product(elementwise, ("mean", "sum", "none")):
        for size in (100, 300_000):
            yield lambda f=loss, r=reduction, n=size: f(
                tensor(2, n, dtype=dtype), tensor(2, n, dtype=dtype).detach(), reduction=r
            )


def four_bits(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    for inner, columns in ((64, 256), (512, 1408), (2048, 2048), (1024, 8192), (96, 128)):
        layer = nn.Linear(inner, columns, bias=columns != 1408, dtype=dtype)
        held = nn.Sequential(layer)
        freeze_in_low_bits(held, "nf4")
        held.cuda()
        for rows in (1, 5, 16, 64, 300, 600, 2048):
            yield lambda m=held, r=rows, i=inner: m(tensor(r, i, dtype=dtype))


KINDS = (attention, by_rows, by_places, products, four_bits, layouts, losses)


def compare(
    cases: Callable[[torch.dtype], Iterator[Callable[[], Any]]], dtype: torch.dtype, role: CudaRole
) -> Allocations:
    # In both threads, so that the workspaces of cuBLAS are there.
    (torch.empty(2, 2, device="cuda", requires_grad=True) @ torch.empty(2, 2, device="cuda")).sum().backward()
    with Allocations(role) as compared:
        for call in cases(dtype):
            result = call()
            if isinstance(result, torch.Tensor) and result.grad_fn is not None:
                result.backward(torch.empty_like(result))
    return compared


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("cases", KINDS)
@pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned")  # of bitsandbytes
def test_operators_allocate_what_the_rules_say_in_their_order(cases, dtype):
    properties = torch.cuda.get_device_properties(0)
    compared = compare(cases, dtype, CudaRole((properties.major, properties.minor), properties.multi_processor_count))
    assert compared.seen > 20
    assert compared.other == []
