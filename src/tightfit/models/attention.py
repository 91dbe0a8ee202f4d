"""The attention of models of `transformers`, by name."""

from typing import Any

from torch import nn

from tightfit.errors import ModelError

FLASH = "flash_attention_2"
OLDEST = (8, 0)  # the compute capability that it needs


def demand_support(name: str, kind: Any) -> None:
    """Raise `ModelError` where a class of `transformers` does not have an attention."""
    supported = {"eager": True, "sdpa": getattr(kind, "_supports_sdpa", False), FLASH: _supports_flash(kind)}
    if not supported[name]:
        others = [other for other, is_supported in supported.items() if is_supported]
        raise ModelError(f"attention {name!r}: {kind.__name__} does not have it: choose {' or '.join(others)}")


def set_attention(model: nn.Module, name: str) -> None:
    """Change the attention of a model that exists. Raises `ModelError` if its attention has no names."""
    changed: Any = model
    if not hasattr(model, "set_attn_implementation"):
        raise ModelError(
            f"attention {name!r}: a {type(model).__name__} is no model of transformers, whose attention has names: "
            "leave it out"
        )
    demand_support(name, type(model))
    changed.set_attn_implementation(name)


def _supports_flash(kind: Any) -> bool:
    compatible = getattr(kind, "_compatible_flash_implementations", None)
    return getattr(kind, "_supports_flash_attn", False) and (compatible is None or FLASH in compatible)
