"""Where a CPU's operators lay their results out: what a dry run says is compared with the operators themselves."""

import itertools

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


def convolved(function, x, channels, width, memory_format=torch.contiguous_format):
    if x.dim() == 3:  # an image of one sample
        x = x[None]
    weight = torch.ones(channels, x.shape[1], *[width] * (x.dim() - 2), dtype=x.dtype).contiguous(
        memory_format=memory_format
    )
    return function(x, weight.requires_grad_(), torch.zeros(channels, dtype=x.dtype))


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
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky relu": F.leaky_relu,
    "hard swish": F.hardswish,
    "hard sigmoid": F.hardsigmoid,
    "hard tanh": F.hardtanh,
    "log sigmoid": F.logsigmoid,
    "mish": F.mish,
    "soft shrink": F.softshrink,
    "hard shrink": F.hardshrink,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "prelu": lambda x: F.prelu(x, torch.full((x.shape[1],), 0.1, dtype=x.dtype)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "squared error": lambda x: F.mse_loss(x, torch.zeros(x.shape, dtype=x.dtype), reduction="none"),
    "smooth error": lambda x: F.smooth_l1_loss(x, torch.zeros(x.shape, dtype=x.dtype), reduction="none"),
    "huber": lambda x: F.huber_loss(x, torch.zeros(x.shape, dtype=x.dtype), reduction="none"),
    "two labels": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.zeros(x.shape, dtype=x.dtype), reduction="none"
    ),
    "two probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.zeros(x.shape, dtype=x.dtype)),
    "divergence": lambda x: F.kl_div(x, torch.ones(x.shape, dtype=x.dtype), reduction="none"),
    "soft margin": lambda x: F.soft_margin_loss(x, torch.ones(x.shape, dtype=x.dtype), reduction="none"),
    "convolution": lambda x: convolved(F.conv2d, x, 6, 3),
    "convolution of single places": lambda x: convolved(F.conv2d, x, 6, 1),
    "transposed convolution": lambda x: convolved(F.conv_transpose2d, x, x.shape[-3], 2),
    "convolution of channels-last weights": lambda x: convolved(F.conv2d, x, 6, 3, torch.channels_last),
    "pooled": lambda x: F.max_pool2d(x, 2),
    "averaged": lambda x: F.avg_pool2d(x, 2),
    "pooled to a size": lambda x: F.adaptive_avg_pool2d(x, 3),
    "mirrored": lambda x: F.pad(x, (1, 1, 1, 1)[: 2 * x.dim() - 4], mode="reflect"),
    "edges repeated": lambda x: F.pad(x, (1, 1, 1, 1)[: 2 * x.dim() - 4], mode="replicate"),
    "root mean square norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "log of a sum": lambda x: x.logsumexp(1),
    "deviation": lambda x: x.float().std(1),
    "norm": lambda x: x.norm(dim=1),
    "normalised": lambda x: F.normalize(x, dim=1),
    "multiplied up": lambda x: x.float().cumprod(1),
    "sorted": lambda x: x.sort(1).values,
    "largest": lambda x: x.topk(2, 1).values,
    "largest of each": lambda x: x.amax(1),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "lower": lambda x: x.tril(),
    "chosen": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "gathered": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.long)),
    "repeated": lambda x: x.repeat_interleave(2, 1),
    "interpolated": lambda x: torch.lerp(x, x * 2, 0.5),
    "product of three": lambda x: torch.addcmul(x, x, x),
    "matrix": lambda x: x @ x.mT,
    "contracted": lambda x: torch.einsum("bc...,bd...->b...cd", x, x),
    "windows": lambda x: x.unfold(1, 3, 2),
    "stacked": lambda x: torch.stack([x, x], 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_lie_as_a_dry_run_says(name, dtype):
    for layout, shape in itertools.product(LAYOUTS, ((3, 8, 6), (3, 8, 6, 4))):
        x = LAYOUTS[layout](torch.randn(shape, dtype=dtype)).requires_grad_()
        with Compared() as compared:
            CALLS[name](x).float().square().sum().backward()
        assert compared.differing == [], layout


@pytest.mark.sampled(60)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_for_a_gradient_of_another_layout_lie_as_a_dry_run_says(name, dtype):
    for of_input, of_gradient in [*((layout, layout) for layout in LAYOUTS), *(("contiguous", g) for g in LAYOUTS)]:
        x = LAYOUTS[of_input](torch.randn((3, 8, 6, 4), dtype=dtype)).requires_grad_()
        out = CALLS[name](x)
        gradient = torch.randn(out.shape, dtype=out.dtype)
        if out.dim() > 2:
            gradient = LAYOUTS[of_gradient](gradient)
        with Compared() as compared:
            out.backward(gradient)
        assert compared.differing == [], (of_input, of_gradient)


IMAGES = {
    "shuffled to pixels": lambda x: F.pixel_shuffle(x, 2),
    "shuffled from pixels": lambda x: F.pixel_unshuffle(x, 2),
    "shuffled by channel": lambda x: F.channel_shuffle(x, 2),
    "pooled and back": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "made larger": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "sampled": lambda x: F.grid_sample(x, torch.zeros(len(x), 4, 5, 2), align_corners=True),
    "leaky at random": lambda x: F.rrelu(x, training=True),
    "a power of two": lambda x: torch.pow(2.0, x),
    "frequencies": lambda x: torch.fft.rfft2(x).abs(),
    "frequencies between": lambda x: torch.fft.irfft2(torch.fft.rfft2(x, dim=(1, 2)), dim=(1, 2)),
    "all frequencies": lambda x: torch.fft.irfftn(torch.fft.rfftn(x)),
    "complex frequencies": lambda x: torch.fft.ifftn(torch.fft.fftn(x)).real,
    "singular vectors": lambda x: torch.linalg.svd(x, full_matrices=False)[0].abs(),
}
VIDEOS = {
    "convolution": lambda x: convolved(F.conv3d, x, 6, 3),
    "convolution of places": lambda x: convolved(F.conv3d, x, 6, 1),
    "convolution in time": lambda x: F.conv3d(x, torch.ones(6, x.shape[1], 3, 1, 1, requires_grad=True)),
    "convolution of channels-last weights": lambda x: convolved(F.conv3d, x, 6, 3, torch.channels_last_3d),
    "convolution of each channel": lambda x: F.conv3d(x, torch.ones(8, 1, 3, 3, 3, requires_grad=True), groups=8),
    "transposed convolution": lambda x: convolved(F.conv_transpose3d, x, x.shape[1], 2),
    "batch norm": batch_norm,
    "group norm": lambda x: F.group_norm(x, 2),
    "pooled": lambda x: F.max_pool3d(x, 2),
    "averaged": lambda x: F.avg_pool3d(x, 2),
    "mirrored": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "edges repeated": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    "rolled": lambda x: x.roll(1, 1),
    "gated": lambda x: F.glu(x, 1),
    "made larger": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
}
SEQUENCES = {
    "convolution": lambda x: F.conv1d(x, torch.ones(6, x.shape[1], 3, requires_grad=True)),
    "convolution of transposed weights": lambda x: F.conv1d(x, torch.ones(6, 3, x.shape[1]).mT.requires_grad_()),
    "convolution of each channel": lambda x: F.conv1d(
        x, torch.ones(x.shape[1], 1, 3, requires_grad=True), groups=x.shape[1]
    ),
}
SHAPES = {
    **{f"image, {name}": (call, (3, 8, 6, 4)) for name, call in IMAGES.items()},
    **{f"video, {name}": (call, (2, 8, 4, 6, 4)) for name, call in VIDEOS.items()},
    **{f"sequence, {name}": (call, (3, 8, 6)) for name, call in SEQUENCES.items()},
    **{f"sequence of numbers, {name}": (call, (3, 1, 6)) for name, call in SEQUENCES.items()},
}


def channels_last_3d(x):
    return x.contiguous(memory_format=torch.channels_last_3d) if x.dim() == 5 else x


@pytest.mark.parametrize("name", SHAPES)
def test_images_videos_and_sequences_lie_as_a_dry_run_says(name):
    call, shape = SHAPES[name]
    for layout, lay in {**LAYOUTS, "videos' channels last": channels_last_3d}.items():
        x = lay(torch.randn(shape)).requires_grad_()
        with Compared() as compared:
            call(x).square().sum().backward()
        assert compared.differing == [], layout


# Operands by their layouts: an expanded one says nothing about the order in some dimensions.
OPERANDS = {
    "contiguous": lambda: torch.ones(3, 8, 6),
    "transposed": lambda: torch.ones(3, 6, 8).transpose(1, 2),
    "first last": lambda: torch.ones(6, 8, 3).permute(2, 1, 0),
    "one number": lambda: torch.ones(()).expand(3, 8, 6),
    "rows repeated": lambda: torch.ones(3, 8, 1).expand(3, 8, 6),
    "one row": lambda: torch.ones(6),
}
PAIRS = {
    "add": torch.add, "multiply": torch.mul, "divide": torch.div, "larger": torch.maximum, "compare": torch.gt,
    "power": torch.pow, "xlogy": torch.xlogy, "logaddexp": torch.logaddexp, "copysign": torch.copysign,
    "heaviside": lambda a, b: torch.heaviside(a, b.to(a.dtype)), "either": torch.logical_or,
    "chosen": lambda a, b: torch.where(a > 0, a, b), "interpolated": lambda a, b: torch.lerp(a, b.to(a.dtype), 0.5),
    "a product added": lambda a, b: torch.addcmul(a, b, b),
    "filled": lambda a, b: a.masked_fill(b > 0, 1.0),
    "relu's gradient": lambda a, b: aten.threshold_backward(a, b.to(a.dtype), 0),
    "silu's gradient": lambda a, b: aten.silu_backward(a, b.to(a.dtype)),
    "dropout's gradient": lambda a, b: aten.native_dropout_backward(a, b > 0, 2.0),
    "the gradient of logits": lambda a, b: aten.logit_backward(a, b.to(a.dtype), 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_pointwise_operator_lays_its_result_out_as_its_operands_lie(name):
    """PyTorch's meta kernels widen 16-bit operands first, which gives an expanded one an order."""
    wrong = []
    dtypes = [(a, a) for a in (torch.float32, torch.bfloat16)] + [(torch.bfloat16, torch.float32)]
    for (first, a), (second, b), kinds in itertools.product(OPERANDS.items(), OPERANDS.items(), dtypes):
        with Compared() as compared:
            PAIRS[name](a().to(kinds[0]), b().to(kinds[1]))
        wrong += [(first, second, kinds, *each) for each in compared.differing]
    assert not wrong
