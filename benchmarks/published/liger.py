"""Liger-Kernel's operators as its benchmark scripts set them up, with the package's own code and kernels.

The counterpart of `operators.py`: the same tensors and layers, and what the provider `liger` measures. Needs triton
and liger_kernel. Their functions run dry: no kernel is launched.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from benchmarks.published.operators import Configuration, Measured, dtype_of, holding, in_mode
from torch import Tensor, nn


def layer(module: str, name: str) -> Any:
    """A class or a function of `liger_kernel.transformers`.

    Its `__init__` is left out: it imports, and old releases patch, models of transformers.
    """
    package = "liger_kernel.transformers"
    if package not in sys.modules:
        root = importlib.util.find_spec("liger_kernel")
        assert root is not None, "liger_kernel is not installed"
        assert root.submodule_search_locations
        empty = ModuleType(package)
        empty.__path__ = [str(Path(root.submodule_search_locations[0]) / "transformers")]
        sys.modules[package] = empty
    return getattr(importlib.import_module(f"{package}.{module}"), name)


def labels(count: int, vocabulary: int) -> Tensor:
    """Known labels: Liger asks whether each one is in the vocabulary."""
    return torch.arange(count) % vocabulary


def cross_entropy(c: Configuration, mode: str, provider: str) -> Measured:
    loss = layer("cross_entropy", "LigerCrossEntropyLoss")()
    logits = torch.randn(c["B"] * c["T"], c["V"], requires_grad=True)
    target = labels(c["B"] * c["T"], c["V"])
    return lambda: loss(logits, target).backward()


def fused_linear_cross_entropy(c: Configuration, mode: str, provider: str) -> Measured:
    dtype = dtype_of(c)
    loss = layer("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss")(ignore_index=-100, reduction="mean")
    other = torch.randn(c["V"], c["H"], dtype=dtype)
    weight = torch.randn(c["V"], c["H"], dtype=dtype).requires_grad_()
    given = torch.randn(c["BT"], c["H"], dtype=dtype, requires_grad=True)
    target = labels(c["BT"], c["V"])
    return holding(lambda: loss(weight, given, target).backward(), other)


def feed_forward(kind: str, name: str) -> Callable[[Configuration, str, str], Measured]:
    def script(c: Configuration, mode: str, provider: str) -> Measured:
        x = torch.randn(c.get("bsz", c.get("B")), c["T"], c["hidden_size"], dtype=dtype_of(c), requires_grad=True)
        shape = {k: c[k] for k in ("hidden_size", "intermediate_size", "hidden_act")}
        mlp = layer(kind, name)(config=SimpleNamespace(**shape, pretraining_tp=1)).to(dtype_of(c))
        return in_mode(mode, lambda: mlp(x), torch.randn_like)

    return script


def layer_norm(c: Configuration, mode: str, provider: str) -> Measured:
    rows, width = c["M"], c["N"]
    norm, other = layer("layer_norm", "LigerLayerNorm")(hidden_size=width), nn.LayerNorm(width, eps=c["eps"])
    return holding(_normed(norm, rows, width, c, mode), other)


def rms_norm(c: Configuration, mode: str, provider: str) -> Measured:
    rows, width = c["M"], c["H"]
    norm, other = layer("rms_norm", "LigerRMSNorm")(hidden_size=width, eps=c["eps"]), torch.ones(width)
    return holding(_normed(norm, rows, width, c, mode), other)


def _normed(norm: nn.Module, rows: int, width: int, c: Configuration, mode: str) -> Measured:
    x = torch.randn(rows, width, dtype=dtype_of(c))
    dy = torch.randn_like(x)
    x.requires_grad_(True)
    return in_mode(mode, lambda: norm(x), lambda y: dy)


def rope(c: Configuration, mode: str, provider: str) -> Measured:
    turn = layer("rope", "liger_rotary_pos_emb")
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

    def full() -> None:
        outputs: tuple[Tensor, Tensor] = turn(q, k, cos, sin, positions)
        torch.autograd.grad(outputs, (q, k), (dq, dk), allow_unused=True, retain_graph=True)

    return holding(full, frequencies)


LIGER: dict[str, Callable[[Configuration, str, str], Measured]] = {
    "cross_entropy": cross_entropy,
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "geglu": feed_forward("geglu", "LigerGEGLUMLP"),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": feed_forward("swiglu", "LigerSwiGLUMLP"),
}
