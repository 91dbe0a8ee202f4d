"""The optimizers by name. No torch here."""

import difflib
from typing import NamedTuple

# What each is, as the documentation says it.
OPTIMIZERS = {
    "adamw": "AdamW, as PyTorch chooses its implementation",
    "adamw_fused": "AdamW in one kernel",
    "adamw8bit": "AdamW with 8-bit states (package bitsandbytes)",
    "adamw4bit": "AdamW with 4-bit states (package torchao)",
    "adamw_bf16": "AdamW for bf16 weights, with 16 more bits kept beside them: an exact fp32 master",
    "adamw_bf16_stochastic": "AdamW for bf16 weights, rounded stochastically",
    "flash_adamw": "AdamW with 8-bit states, and for bf16 weights 8 more bits kept beside them: 24-bit masters",
    "offloaded_adamw": "AdamW with its states on the host; `offloaded_adamw:0.5` for half of them",
    "adam": "Adam",
    "muon": "Muon on matrices, AdamW on the rest",
    "adafactor": "Adafactor",
    "sgd": "SGD",
}
OFFLOADED = "offloaded_adamw"
FLASH = "flash_adamw"
OF_WHOLE_MATRICES = ("muon", "adafactor")  # an update of a matrix's part needs the rest


FOR_BF16 = ("adamw_bf16", "adamw_bf16_stochastic")

# The names of other trainers.
FOREIGN = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "adamw_torch_4bit": "adamw4bit",
}


class OptimizerName(NamedTuple):
    """A kind of optimizer, and the share of its states on the host, where the name has one."""

    kind: str
    fraction: float | None = None


def optimizer_in_words(name: str, step_in_backward: bool) -> str:
    """An optimizer as tables call it."""
    return f"{name}, step in backward" if step_in_backward else name


def parse_optimizer(text: str) -> OptimizerName:
    """What a name such as `adamw` or `offloaded_adamw:0.5` means. Raises `ValueError` with one clear line."""
    kind, colon, share = text.partition(":")
    if kind not in OPTIMIZERS:
        near = difflib.get_close_matches(kind, OPTIMIZERS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else f": choose one of {', '.join(OPTIMIZERS)}"
        raise ValueError(f"optimizer {text!r} is not known{hint}")
    if not colon:
        return OptimizerName(kind)
    if kind != OFFLOADED:
        raise ValueError(f"optimizer {text!r}: only {OFFLOADED} takes a share of states, as in {OFFLOADED}:0.5")
    try:
        fraction = float(share)
    except ValueError:
        raise ValueError(f"optimizer {text!r}: {share!r} is no number: write {OFFLOADED}:0.5") from None
    if not 0 <= fraction <= 1:
        raise ValueError(f"optimizer {text!r}: the share of the states on the host goes from 0 to 1")
    return OptimizerName(kind, fraction)
