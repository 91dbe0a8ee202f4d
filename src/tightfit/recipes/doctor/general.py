"""Remedies for an out-of-memory error of which only a log is known, ranked by their effect on the result.

Nothing is run dry, so these remedies have no price. Figures in their lines are those of the log.
"""

from tightfit.recipes.ways import Remedy

MIB = 2**20
KINDS = ("cpu", "cuda")  # of devices that are predicted and trained on


def general_remedies(
    device: str, phase: str | None, limit_bytes: int | None, *, loading: bool = False
) -> tuple[Remedy, ...]:
    """Remedies for an error in a phase (None: not known), where `limit_bytes` were there for tensors (None: not known).

    `device` is PyTorch's name of the one that ran out. What an optimizer takes no plan lowers, and before the first
    forward there is nothing to plan.
    """
    kind = device.partition(":")[0]
    if kind not in KINDS:
        return ()  # nothing of tightfit's has ever run there
    if loading:
        return (_ADAPTERS_ON_FOUR_BITS, _NARROW_WEIGHTS)
    budget = "90%" if limit_bytes is None else f"{limit_bytes // MIB}MiB"
    plans = (
        _plan("recompute and offload what the budget has no room for", "exact", budget, ["exact", "offload"]),
        _plan("that, with the loss in chunks and micro-batches", "rounding", budget, ["rounding", "offload"]),
    )
    of_states = (_STATES_ON_THE_HOST, _STEP_IN_BACKWARD)
    inexact = (_autocast(kind), _FLASH, _ADAPTERS_ON_FOUR_BITS)
    if phase == "optimizer":
        return (*of_states, *inexact[1:])
    return (*plans, *(of_states if phase == "backward" else ()), *inexact)


def _plan(name: str, exactness: str, budget: str, levers: list[str]) -> Remedy:
    named = ", ".join(f'"{lever}"' for lever in levers)
    return Remedy(
        name,
        exactness,
        f'import tightfit; plan = tightfit.plan(model, batch, "{budget}", levers=[{named}]); plan.apply(model)',
        f"memory: {{budget: {budget}, levers: [{', '.join(levers)}]}}",
    )


def _autocast(kind: str) -> Remedy:
    return Remedy(
        "autocast to bf16",
        "inexact",
        f'import torch; loss = torch.autocast("{kind}", torch.bfloat16)(model)(**batch).loss',
        "training: {precision: bf16}",
    )


_STATES_ON_THE_HOST = Remedy(
    "AdamW with its states on the host",
    "exact",
    "from tightfit.optim import OffloadedAdamW; optimizer = OffloadedAdamW(model.parameters())",
    "training: {optimizer: offloaded_adamw}",
)
_STEP_IN_BACKWARD = Remedy(
    "step in backward, which frees each gradient at once",
    "exact",
    "from tightfit.optim import step_in_backward; step_in_backward(optimizer, model)",
    "training: {step_in_backward: true, grad_clip: null}",
)
_FLASH = Remedy(
    "AdamW with 8-bit states",
    "inexact",
    "from tightfit.optim import FlashAdamW; optimizer = FlashAdamW(model.parameters())",
    "training: {optimizer: flash_adamw}",
)
_ADAPTERS_ON_FOUR_BITS = Remedy(
    "low-rank adapters on weights in 4 bits",
    "inexact",
    "from tightfit.training.config import AdapterConfig; from tightfit.models.adapters import add_adapter; "
    'model = add_adapter(model, AdapterConfig(r=16, alpha=32, base="nf4"))',
    "model: {path: FOLDER, adapter: {r: 16, alpha: 32, base: nf4}}",
)
_NARROW_WEIGHTS = Remedy(
    "weights in bf16",
    "inexact",
    "import torch; from tightfit.models.dtypes import convert_weights; convert_weights(model, torch.bfloat16)",
    "model: {path: FOLDER, dtype: bf16}",
)
