"""The attention of models of `transformers`, by name.

A dry run plays flash-attention (the package `flash_attn`, which cannot be built without CUDA) by PyTorch's own flash
attention. Both save query, key, value, output and one number in fp32 for each row.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tightfit.errors import ModelError
from tightfit.runtime.activity import now
from tightfit.tracing.build import is_building
from tightfit.tracing.cuda.attention import Call, attend_by_flash

FLASH = "flash_attention_2"
PLAYED = f"{FLASH}, played"  # models ask whether "flash" is in the name
WIDEST = 256  # the widest head that the package takes (`mha_fwd` in csrc/flash_attn/flash_api.cpp)
OLDEST = (8, 0)  # the compute capability that it needs
PLAYED_LINE = "flash_attention_2 is played as PyTorch's own flash attention: the same bytes; no window saves time there"


def implementation(name: str, kind: Any) -> str | None:
    """What `transformers` is told at the construction of a model class `kind`; None for its own choice.

    Raises `ModelError` where the class does not support it.
    """
    if name == "auto":
        return None
    _demand_support(name, kind)
    return None if name == FLASH and is_building() else name


def set_attention(model: nn.Module, name: str) -> None:
    """Change the attention of a model that exists. Raises `ModelError` if it is not one that can change it."""
    model_of: Any = model
    if name == "auto":
        return
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(
            f"attention {name!r}: a {type(model).__name__} is no model of transformers, whose attention has names: "
            "leave it out"
        )
    _demand_support(name, type(model))
    if name == FLASH and is_building():
        play_flash(model)
    else:
        model_of.set_attn_implementation(name)


def play_flash(model: nn.Module) -> None:
    """Have a model of `transformers` call PyTorch's flash attention where it would call that of `flash_attn`."""
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(PLAYED, _played)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PLAYED, flash_attention_mask)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Past the setter, which loads the package.
            module.config._attn_implementation_internal = PLAYED


def _demand_support(name: str, kind: Any) -> None:
    supported = {"eager": True, "sdpa": getattr(kind, "_supports_sdpa", False), FLASH: _supports_flash(kind)}
    if not supported[name]:
        others = [other for other, is_supported in supported.items() if is_supported]
        raise ModelError(f"attention {name!r}: {kind.__name__} does not have it: choose {' or '.join(others)}")


def _supports_flash(kind: Any) -> bool:
    compatible = getattr(kind, "_compatible_flash_implementations", None)
    return getattr(kind, "_supports_flash_attn", False) and (compatible is None or FLASH in compatible)


def _played(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """`flash_attention_forward` of transformers (integrations/flash_attention.py), with PyTorch's kernel."""
    from transformers.integrations.flash_attention import get_target_dtype

    width, value_width = query.shape[-1], value.shape[-1]
    if not now.playing_cuda:
        raise ModelError(f"{FLASH} runs on CUDA alone: name a card as the device, or take sdpa")
    if width > WIDEST:
        raise ModelError(f"{FLASH} takes heads of at most {WIDEST} numbers, and these have {width}: take sdpa")
    target = get_target_dtype(query, module) or query.dtype
    if target not in (torch.bfloat16, torch.float16):
        raise ModelError(
            f"{FLASH} takes bf16 or fp16, and here is fp32: take the precision bf16, weights in bf16, or sdpa"
        )
    query, key, value = (tensor.to(target) for tensor in (query, key, value))
    value = pad(value, (0, width - value_width)) if value_width != width else value
    causal = bool(module.is_causal if is_causal is None else is_causal) and query.shape[2] > 1
    call = Call(query, key, value, None, dropout, causal, query.shape[1] != key.shape[1])
    out = attend_by_flash(call, scaling).transpose(1, 2)
    return (out[..., :value_width] if value_width != width else out), None
