"""What operators copy on a card where their operands lie otherwise, and Fourier transforms: as the rules say, in order.

The operators are those of the CPU's test of layouts, and more that copy there.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "tracing"))
import test_layouts
from test_operators import Allocations

import tightfit
from tightfit.runtime.internals import clear_cublas_workspaces
from tightfit.tracing.cuda.role import CudaRole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's CUDA build and a card")


def images(x):
    return x if x.dim() == 4 else x[None]


def numbers(x, count):
    return torch.zeros(count, dtype=torch.long, device=x.device)


def of_complex(x):
    return torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())


MORE = {
    "magnitude": lambda x: of_complex(x).abs(),
    "angle": lambda x: of_complex(x).angle(),
    "mirrored in one dimension": lambda x: F.pad(x.flatten(2) if x.dim() == 4 else x, (1, 1), mode="reflect"),
    "circular": lambda x: F.pad(images(x), (1, 1, 1, 1), mode="circular"),
    "rolled twice": lambda x: x.roll((1, 2), (0, 1)),
    "rolled flat": lambda x: x.roll(1),
    "median": lambda x: x.median(1).values,
    "smallest but one": lambda x: x.kthvalue(2, 1).values,
    "largest so far": lambda x: x.cummax(1).values,
    "smallest so far": lambda x: x.cummin(1).values,
    "sums of exponentials": lambda x: x.logcumsumexp(1),
    "counted": lambda x: (x > 0).cumsum(1) * x,
    "patches": lambda x: F.unfold(images(x), 2),
    "patches put together": lambda x: F.fold(F.unfold(images(x), 2), x.shape[-2:], 2),
    "largest of places": lambda x: F.adaptive_max_pool2d(images(x), 3),
    "made larger": lambda x: F.interpolate(images(x), scale_factor=2, mode="bicubic"),
    "leaky at random": lambda x: F.rrelu(x, training=True),
    "local response": lambda x: F.local_response_norm(x, 2),
    "distances": lambda x: torch.cdist(x.float(), x.float()),
    "distances one by one": lambda x: torch.cdist(x.float(), x.float(), compute_mode="donot_use_mm_for_euclid_dist"),
    "put into a mask": lambda x: torch.zeros_like(x).masked_scatter(x > 0, x),
    "put into rows": lambda x: torch.zeros_like(x).masked_scatter((x[..., :1] > 0).expand_as(x), x),
    "frequencies": lambda x: torch.fft.fft(x.float()).abs(),
    "frequencies of another dimension": lambda x: torch.fft.rfft(x.float(), dim=1).abs(),
    "frequencies of two": lambda x: torch.fft.rfft2(x.float()).abs(),
    "frequencies of the first two": lambda x: torch.fft.rfft2(x.float(), dim=(0, 1)).abs(),
    "frequencies of all": lambda x: torch.fft.rfftn(x.float()).abs(),
    "frequencies of complex numbers": lambda x: torch.fft.fftn(x.to(torch.complex64), dim=(0, 2)).abs(),
    "from frequencies": lambda x: torch.fft.irfft(torch.fft.rfft(x.float())),
    "from frequencies of another dimension": lambda x: torch.fft.irfft(torch.fft.rfft(x.float(), dim=1), dim=1),
    "from frequencies of all": lambda x: torch.fft.irfftn(torch.fft.rfftn(x.float())),
    "padded, and from frequencies": lambda x: torch.fft.irfft(torch.fft.rfft(x.float(), n=16, dim=1), dim=1),
}  # fmt: skip
# Blocks of a few kilobytes that are not counted, or copies in layouts that models do not have.
NOT_COUNTED = {
    "aten.native_batch_norm.default", "aten.native_batch_norm_backward.default", "aten.unfold_backward.default",
    "aten.sort.default", "aten.sum.default", "aten.sum.dim_IntList", "aten._adaptive_avg_pool2d.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default", "aten.avg_pool2d.default",
    "aten.avg_pool2d_backward.default", "aten.masked_scatter_backward.default",
}  # fmt: skip
CALLS = {**test_layouts.CALLS, **MORE}


@pytest.mark.keeps("card-copies-counted")
@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_copied_is_what_the_rules_say(name, monkeypatch):
    torch.set_default_device("cuda")
    try:
        others = set()
        for dtype in test_layouts.DTYPES:
            for layout, shape in ((n, s) for n in test_layouts.LAYOUTS for s in ((3, 8, 6), (16, 8, 32, 16))):
                x = test_layouts.LAYOUTS[layout](torch.randn(shape, dtype=dtype)).requires_grad_()
                with Allocations(CudaRole((8, 9), 128)) as found:
                    CALLS[name](x).float().square().sum().backward()
                assert found.seen > 3
                others |= {
                    f"{layout} {shape}: {other}" for other in found.other if other.split(":")[0] not in NOT_COUNTED
                }
        assert not others
    finally:
        torch.set_default_device(None)


class Spectral(nn.Module):
    """A product, a mixing of frequencies, and a loss."""

    def __init__(self, mix, width=64):
        super().__init__()
        self.inner, self.outer, self.mix = nn.Linear(width, width), nn.Linear(width, width), mix

    def forward(self, x):
        return self.outer(self.mix(self.inner(x))).square().mean()


MIXED = {
    "Fourier mixing": lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real,
    "long convolution": lambda x: torch.fft.irfft(
        torch.fft.rfft(x, n=2 * x.shape[1], dim=1) * torch.fft.rfft(x, n=2 * x.shape[1], dim=1), dim=1
    )[:, : x.shape[1]],
    "filter": lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2),
    "magnitudes": lambda x: torch.fft.fft(x).abs(),
}


@pytest.mark.keeps("card-copies-counted")
@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("name", MIXED)
def test_a_step_with_fourier_transforms_takes_the_predicted_bytes(name):
    clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    model, batch = Spectral(MIXED[name]).cuda(), (torch.randn(16, 256, 64, device="cuda"),)
    found = tightfit.estimate(model, batch, loss=lambda model, batch: model(*batch), optimizer="sgd", device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found.peak_bytes == torch.cuda.max_memory_allocated() - before
