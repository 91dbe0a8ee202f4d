"""Measures what only a CUDA device has: a link to the host, scratch memory of libraries."""

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch.optim.adamw import adamw

from tightfit.devices.room import NoRoom, largest_that_fits
from tightfit.devices.timing import Call, fastest
from tightfit.runtime.internals import clear_cublas_workspaces

SECONDS = 0.3  # for each of the measurements
ROUNDS = 10
LINK_BYTES = 2**28
HOST_NUMBERS = 2**24  # of each tensor of the host: many times what caches hold
UPDATE_PASSES = 7  # it reads weight, gradient and two moments, and writes all but the gradient
PRODUCT_SIDE = 1024
# Batch, heads, length, width of the attention whose scratch memory is measured.
ATTENTION_SHAPE = (1, 32, 1024, 128)


def link_rates() -> dict[str, float]:
    """Bytes per second between host and device, by direction and kind of host memory (`"to_device/pinned"`)."""

    def smaller(size: int) -> int | None:
        return size // 2 or None

    size, on_device = largest_that_fits(
        LINK_BYTES, lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), smaller
    )
    calls: dict[str, Call] = {}
    for kind in ("pinned", "pageable"):
        on_host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        calls[f"to_device/{kind}"] = _copy(on_device, on_host)
        calls[f"to_host/{kind}"] = _copy(on_host, on_device)
    seconds = fastest(calls, "cuda", SECONDS, ROUNDS)
    return {name: size / spent for name, spent in seconds.items()}


def host_rates() -> dict[str, float]:
    """Bytes per second at which the host works in its own memory, by their names in a spec: of a sum, as McCalpin's
    STREAM adds, and of PyTorch's fused AdamW.
    """
    first, second, total, weights = (torch.ones(HOST_NUMBERS) for _ in range(4))
    step = torch.tensor(0.0)

    def update() -> None:
        adamw(
            [weights], [first], [second], [total], [], [step], foreach=False, fused=True, amsgrad=False, beta1=0.9,
            beta2=0.999, lr=1e-3, weight_decay=1e-2, eps=1e-8, maximize=False,
        )  # fmt: skip

    calls: dict[str, Call] = {"add": lambda: torch.add(first, second, out=total), "update": update}
    with torch.no_grad():
        seconds = fastest(calls, "cpu", SECONDS, ROUNDS)
    return {
        "host_bytes_per_second": 3 * total.nbytes / seconds["add"],
        "host_update_bytes_per_second": UPDATE_PASSES * total.nbytes / seconds["update"],
    }


def _copy(target: torch.Tensor, source: torch.Tensor) -> Call:
    return lambda: target.copy_(source, non_blocking=True)


def workspaces() -> Mapping[str, int]:
    """Bytes that libraries allocate from PyTorch's allocator, measured by the allocator's own count.

    `"cublas"` and `"cublaslt"` remain allocated until the process ends, after a product (or one with a bias) in half
    precision. From torch 2.15 on they are 0, because each product frees its workspace. `"attention_backward"` is
    allocated while the backward of attention in half precision runs, at `ATTENTION_SHAPE`. What finds no room is left
    out.
    """
    torch.cuda.synchronize()
    clear_cublas_workspaces()
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    a, b, out = (torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, device="cuda", dtype=half) for _ in range(3))
    bias = torch.ones(PRODUCT_SIDE, device="cuda", dtype=half)
    wanted: dict[str, Callable[[], int]] = {
        "cublas": lambda: _kept(lambda: torch.mm(a, b, out=out)),
        "cublaslt": lambda: _kept(lambda: torch.addmm(bias, a, b, out=out)),
        "attention_backward": lambda: _attention_backward_bytes(half),
    }
    found = {}
    for name, measured in wanted.items():
        with suppress(NoRoom):  # a table shows this figure, and no prediction rests on it
            found[name] = largest_that_fits(name, lambda _, measured=measured: measured(), lambda _: None)[1]
    return found


def _kept(call: Call) -> int:
    """Bytes that remain allocated after a call that returns no new tensor."""
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def _attention_backward_bytes(dtype: torch.dtype) -> int:
    """Bytes besides the three gradients while attention's backward runs."""
    q, k, v = (torch.ones(ATTENTION_SHAPE, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    with torch.enable_grad():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.ones_like(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(out, (q, k, v), gradient)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in gradients)
