"""Freezes the linear layers of a base model in fewer bits, for training adapters.

This is inexact, because the codes only approximate the weights. Every dry run sees the saved bytes, and the bytes of
the full-width weight during a product.
"""

import importlib
import math
import re
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.errors import InputError, ModelError
from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.ops.weights.experts import LowBitExperts, freeze_experts, fused_experts, widen_experts
from tightfit.ops.weights.int8 import Int8Linear

LowBits = Literal["int8", "fp8", "nf4"]


def freeze_in_low_bits(model: nn.Module, kind: LowBits, *, head: nn.Module | None = None) -> None:
    """Freeze a model and replace the weights of its linear layers, except the output head's, and those of fused experts
    by codes.

    `head` is the output head of a model that does not name it as those of `transformers` do.

    `int8` takes one byte for each weight, and an fp32 scale for each row; so does `fp8` (e4m3). `nf4` takes half a byte
    for each weight, and an fp32 scale for 64 weights (bitsandbytes; Dettmers et al. 2023, "QLoRA"). Raises `InputError`
    if the package is missing, and `ModelError` if the model has no such layer.
    """
    model.requires_grad_(False)
    layers = {path: layer for path, layer in linear_layers(model).items() if layer is not head}
    if not layers:
        raise ModelError(f"{type(model).__name__} has no linear layers but its head: weights in {kind} save nothing")
    for path, layer in layers.items():
        _replace(model, path, _nf4(layer) if kind == "nf4" else Int8Linear.of(layer, kind))
    for experts in fused_experts(model).values():
        freeze_experts(experts, kind)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model by path, without the one that computes the logits."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    return {path: m for path, m in model.named_modules() if type(m) is nn.Linear and m is not head}


def at_full_width(model: nn.Module) -> nn.Module:
    """Replace low-bit weights by the fp32 weights that they represent, for a reference run. Returns the model."""
    for path, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if isinstance(module, LowBitExperts):
            widen_experts(module)
        elif isinstance(module, Int8Linear):
            _replace(model, path, _linear(module.widened(), module.bias))
        elif isinstance(weight, torch.Tensor) and is_traceable_wrapper_subclass(weight):
            held: Any = weight
            module.weight = nn.Parameter(held.dequantize().detach(), requires_grad=False)
        elif getattr(weight, "quant_state", None) is not None:
            held = weight
            from tightfit.ops.weights.nf4 import read_as_one_row

            full = read_as_one_row(held, held.quant_state, held.quant_state.dtype)
            _replace(model, path, _linear(full, module._parameters.get("bias")))
    return model


def is_in_low_bits(module: nn.Module) -> bool:
    """True if the module's own weight is in few bits."""
    weight = module._parameters.get("weight")
    return (
        isinstance(module, Int8Linear | LowBitExperts)
        or (isinstance(weight, torch.Tensor) and is_traceable_wrapper_subclass(weight))
        or getattr(weight, "quant_state", None) is not None
    )


def weights_in(parameter: torch.Tensor) -> int:
    """How many weights a parameter holds: two in each byte of 4-bit ones."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def count_weights(model: nn.Module) -> int:
    """How many weights a model has, in however few bits."""
    return sum(map(weights_in, model.parameters()))


def _nf4(layer: nn.Linear) -> nn.Module:
    """The layer with a 4-bit weight."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise InputError("weights in nf4 need the package bitsandbytes: pip install 'tightfit[lowbit]'") from error
    from tightfit.ops.weights.nf4 import NF4Linear  # imports bitsandbytes

    return NF4Linear.of(layer)


def _linear(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    layer.register_parameter("bias", bias)
    return layer


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


_WRAPPERS = re.compile(r"^base_model\.model\.|\.(base_layer|original_module)(?=\.|$)")
_COUNT = re.compile(r"(?<=\.)\d+(?=\.|$)")


class FrozenBase(NamedTuple):
    """The frozen weights of a model.

    `bytes` are those of all frozen weights with their scales. `not_quantised` are the bytes of those at full width
    where others are in few bits, by the name of their module with `*` for the numbers of layers, the largest first.
    `adapted` are the names of the layers that have adapters.
    """

    bytes: int
    not_quantised: dict[str, int]
    adapted: tuple[str, ...]


def frozen_base(model: nn.Module) -> FrozenBase:
    """The frozen weights of a model."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    narrow = {id(p) for m in model.modules() if is_in_low_bits(m) for p in m._parameters.values()}
    wide: dict[str, int] = {}
    for path, parameter in model.named_parameters() if narrow else ():
        if not parameter.requires_grad and id(parameter) not in narrow:
            name = _COUNT.sub("*", _WRAPPERS.sub("", path)).removesuffix(".weight")
            wide[name] = wide.get(name, 0) + parameter.nbytes
    adapted = {
        getattr(module, "parameter_name", path.rpartition(".")[2])  # peft adapts parameters too
        for path, module in model.named_modules()
        if "base_layer" in module._modules
    }
    return FrozenBase(
        bytes=storage_bytes([*frozen, *(scale for parameter in frozen for scale in scales_of(parameter))]),
        not_quantised=dict(sorted(wide.items(), key=lambda item: -item[1])),
        adapted=tuple(sorted(adapted)),
    )
