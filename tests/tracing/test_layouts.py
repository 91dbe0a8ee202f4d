"""Where a CPU's operators lay their results out: what a dry run says is compared with the operators themselves."""

import pytest
import torch
import torch.nn.functional as F

from tightfit.runtime.operators import traits_of
from tightfit.tracing.shapes import TensorShape, inputs_and_key, result_shapes

pytestmark = pytest.mark.keeps("dry-run-lays-results")

aten = torch.ops.aten
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last first": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "expanded": lambda x: x[:1].expand_as(x),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
DTYPES = [torch.float32, torch.bfloat16]


class Compared(torch.utils._python_dispatch.TorchDispatchMode):
    """Compares each operator's results with those that a dry run would take it to have."""

    def __init__(self):
        super().__init__()
        self.differing = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not (traits_of(func).is_view or traits_of(func).returns_written):
            _, key = inputs_and_key(func, args, kwargs)
            told = result_shapes(func, args, kwargs, key, lambda tensor: False)
            flat = [told] if isinstance(told, TensorShape) else [t for t in told if isinstance(t, TensorShape)]
            real = [out] if isinstance(out, torch.Tensor) else [t for t in out if isinstance(t, torch.Tensor)]
            for one, other in zip(flat, real, strict=True):
                same = one.shape == tuple(other.shape) and one.dtype == other.dtype
                moved = any(a != b for n, a, b in zip(one.shape, one.stride, other.stride(), strict=True) if n > 1)
                if not same or (moved and other.numel() > 1):
                    self.differing.append((str(func), one, TensorShape.of(other)))
        return out


def batch_norm(x, training=True):
    width = x.shape[1]
    weight = torch.ones(width, requires_grad=True)
    return F.batch_norm(x, torch.zeros(width), torch.ones(width), weight, torch.zeros(width), training)


CALLS = {
    "batch norm": batch_norm,
    "batch norm at rest": lambda x: batch_norm(x, training=False),
    "instance norm": F.instance_norm,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(1),
    "gelu": F.gelu,
    "silu": F.silu,
    "sum": lambda x: x + x.transpose(1, 2).contiguous().transpose(1, 2),
    "product": lambda x: x * x.mean(1, keepdim=True),
    "cumulative sum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(-1),
    "joined": lambda x: torch.cat([x, x], 1),
    "padded": lambda x: F.pad(x, (1, 1)),
    "rolled": lambda x: x.roll(1, 1),
    "flipped": lambda x: x.flip(1),
    "power": lambda x: x.abs().pow(1.5),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "clamped": lambda x: x.clamp(min=0),
    "gated": lambda x: F.glu(x, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_a_dry_run_says(name, layout, dtype):
    for shape in ((3, 8, 6), (3, 8, 6, 4)):
        x = LAYOUTS[layout](torch.randn(shape, dtype=dtype)).requires_grad_()
        with Compared() as compared:
            CALLS[name](x).float().square().sum().backward()
        assert compared.differing == []
