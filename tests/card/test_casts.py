"""Autocast's casts on CUDA, operator by operator: those of PyTorch's CUDA build, and those of a dry run.

Needs PyTorch's CUDA build with a card, which may be one that computes nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.tracing.cuda.role import CudaRole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch's CUDA build and a card")
CARD = CudaRole((8, 9), 128)


class Casts(TorchDispatchMode):
    """Notes what is cast: the dtype and the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((args[0].dtype, result.dtype, tuple(args[0].shape)))
        return result


def calls(device: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One call of each kind of signature: optional tensors, lists, keywords, several dtypes."""

    def fp32(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device).add_(0.1).requires_grad_()

    def fp16(*shape: int) -> torch.Tensor:
        return fp32(*shape).half()

    weight = fp32(8, 3)
    first = torch.zeros(1, dtype=torch.long, device=device)
    yield "linear", lambda: F.linear(fp32(4, 8), fp32(16, 8), fp32(16))
    yield "linear without a bias", lambda: F.linear(fp32(4, 8), fp32(16, 8))
    yield "addmm", lambda: torch.addmm(fp32(6), fp32(4, 5), fp32(5, 6))
    yield "addmm by names", lambda: torch.addmm(mat2=fp32(5, 6), input=fp32(6), mat1=fp32(4, 5))
    yield "baddbmm", lambda: torch.baddbmm(fp32(2, 4, 6), fp32(2, 4, 5), fp32(2, 5, 6))
    yield "matmul", lambda: fp32(4, 5) @ fp32(5, 6)
    yield "one weight twice", lambda: (fp32(4, 8) @ weight, fp32(5, 8) @ weight)
    yield "einsum", lambda: torch.einsum("ab,bc,cd->ad", fp32(3, 4), fp32(4, 5), fp32(5, 6))
    yield "multi_dot", lambda: torch.linalg.multi_dot([fp32(3, 4), fp32(4, 5), fp32(5, 6)])
    yield "addr", lambda: torch.addr(fp32(3, 4), fp32(3), fp32(4))
    yield "prelu", lambda: F.prelu(fp32(4, 3), fp32(3))
    yield "conv1d", lambda: F.conv1d(fp32(2, 3, 9), fp32(4, 3, 3), fp32(4))
    yield "layer_norm", lambda: F.layer_norm(fp16(4, 8), (8,), fp16(8), fp16(8))
    yield "mse_loss", lambda: F.mse_loss(fp16(4, 8), fp32(4, 8).bfloat16())
    yield "kl_div", lambda: F.kl_div(fp16(4, 8), fp16(4, 8), reduction="sum")
    yield "bce with logits", lambda: F.binary_cross_entropy_with_logits(fp16(4, 8), fp16(4, 8), fp16(4, 1).detach())
    yield "addcmul", lambda: torch.addcmul(fp32(4, 8), fp16(4, 8), fp16(1, 8))
    yield "index_put", lambda: torch.index_put(fp32(4, 3), (first,), fp16(1, 3))
    yield "cosine_similarity", lambda: F.cosine_similarity(fp16(4, 3), fp16(2, 4, 3))
    yield "gru_cell", lambda: torch.gru_cell(fp32(2, 4), fp32(2, 6), fp32(18, 4), fp32(18, 6), fp32(18), fp32(18))
    yield "pow", lambda: torch.pow(fp16(4), fp32(4).bfloat16())
    yield "sum", lambda: fp16(4, 3).sum(-1)
    yield "norm", lambda: fp16(4, 3).norm()


def casts(call: Callable[[], Any]) -> list[Any]:
    # A convolution without cuDNN, whose library need not be there.
    with torch.backends.cudnn.flags(enabled=False), torch.autocast("cuda", torch.bfloat16), Casts() as noted:
        call()
    return noted.seen


@pytest.mark.parametrize("name", [name for name, _ in calls("cpu")])
def test_a_dry_run_casts_in_the_order_of_the_cuda_build(name):
    real = casts(dict(calls("cuda"))[name])
    assert real
    with CARD.simulated():
        assert casts(dict(calls("cpu"))[name]) == real
