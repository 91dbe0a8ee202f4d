"""The recipe of a step as it was asked for, and recipes like it that need less memory."""

from dataclasses import replace

import torch
from torch import nn

from tightfit.models.adapters import is_adapted, usual_layers
from tightfit.models.diffusion import is_denoiser
from tightfit.names import OFFLOADED, OPTIMIZERS, facts_of
from tightfit.optim.in_backward import steps_in_backward
from tightfit.planner.blocks.find import find_blocks
from tightfit.planner.request import Request
from tightfit.recipes.choices import ADAPTER, half_of, installed
from tightfit.recipes.records import Recipe
from tightfit.recipes.variants import holds_fp32
from tightfit.runtime.module_paths import module_at
from tightfit.step import Optimizer

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
PLAIN = ("adamw", "adamw_fused")
UNKNOWN = "adamw"  # stands for an optimizer that has no name here, and is never changed


def kind_of(optimizer: Optimizer) -> str | None:
    """The name of an optimizer; None for one that has none here. A factory may have it as its attribute `kind`."""
    if not isinstance(optimizer, str):
        name = getattr(optimizer, "kind", type(optimizer).__name__.lower())
        if name == "adamw" and getattr(optimizer, "defaults", {}).get("fused"):
            return "adamw_fused"
        of_class = (own for own, facts in OPTIMIZERS.items() if facts.made.rpartition(".")[2].lower() == name)
        name = next(of_class, name)
    else:
        name = optimizer
    return name if name.partition(":")[0] in OPTIMIZERS else None


def recipe_of(request: Request) -> Recipe:
    """The recipe of a step as it was asked for."""
    optimizer = request.optimizer
    return Recipe(
        dtype="bf16" if main_dtype(request.model) == torch.bfloat16 else "fp32",
        optimizer=kind_of(optimizer) or UNKNOWN,
        step_in_backward=request.settings.step_in_backward or steps(optimizer),
        precision=request.settings.precision,
    )


def steps(optimizer: Optimizer) -> bool:
    """True if an optimizer steps in backward by itself. A factory may say so by its attribute `step_in_backward`."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return steps_in_backward(optimizer)
    return bool(getattr(optimizer, "step_in_backward", False))


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most of the weights that are trained."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.__getitem__)


def frugal_optimizers(request: Request, recipe: Recipe) -> list[Recipe]:
    """Recipes with the same weights and an optimizer that needs less, those that keep every bit first.

    Only in the place of AdamW: other optimizers learn differently from these.
    """
    if kind_of(request.optimizer) not in PLAIN:
        return []
    # States on the host save nothing where the host is the device.
    names = [*([] if request.device.kind == "cpu" else [OFFLOADED]), "flash_adamw", "adamw8bit", "adafactor"]
    return installed(replace(recipe, optimizer=name) for name in names)


def in_backward(request: Request, recipe: Recipe) -> Recipe | None:
    """The recipe with the step in backward; None where it is already, or needs all gradients at once."""
    if kind_of(request.optimizer) is None or not facts_of(recipe.optimizer).steps_in_backward:
        return None
    if recipe.step_in_backward or request.settings.grad_clip is not None or request.settings.precision == "fp16":
        return None
    return replace(recipe, step_in_backward=True)


def autocast(request: Request, recipe: Recipe) -> Recipe | None:
    """The recipe with autocast to bf16, where it computes in fp32 and the device has products in bf16."""
    if recipe.precision != "fp32" or recipe.dtype != "fp32" or half_of(request.device) != "bf16":
        return None
    return replace(recipe, precision="bf16")


def narrow_weights(request: Request, recipe: Recipe) -> list[Recipe]:
    """Recipes with weights in bf16, where the whole model is trained in fp32 by AdamW."""
    if recipe.dtype != "fp32" or not trains_all(request.model) or half_of(request.device) != "bf16":
        return []
    if kind_of(request.optimizer) not in PLAIN or holds_fp32(request.batch):
        return []
    low = replace(recipe, dtype="bf16", precision="fp32")
    return [replace(low, optimizer=name) for name in ("adamw_bf16", "flash_adamw", "adamw_bf16_stochastic")]


def adapted(request: Request, recipe: Recipe) -> list[Recipe]:
    """Recipes with low-rank adapters on the model as it is, and on weights of few bits, installed or not."""
    if not trains_all(request.model) or kind_of(request.optimizer) is None:
        return []
    targets = layers_to_adapt(request.model, request.blocks)
    if targets == ():
        return []
    optimizer = recipe.optimizer if recipe.optimizer in ("adam", "sgd", *PLAIN) else "adamw"
    return [
        replace(
            recipe,
            adapter=ADAPTER.model_copy(update={"target_modules": targets, "base": base}),
            optimizer=optimizer,
            step_in_backward=False,
        )
        for base in (recipe.dtype, "nf4")
    ]


def trains_all(model: nn.Module) -> bool:
    """True if all weights are trained, in a dtype that recipes have, and without adapters."""
    known = main_dtype(model) in DTYPES
    return known and not is_adapted(model) and all(p.requires_grad for p in model.parameters())


def layers_to_adapt(model: nn.Module, blocks: str | None) -> str | tuple[str, ...] | None:
    """The layers that adapters go on: those of `usual_layers`, or the linear ones of all blocks."""
    if _is_of_transformers(model) or is_denoiser(model):
        return usual_layers(model)
    others = {end for path, m in model.named_modules() if not isinstance(m, nn.Linear) for end in _ends_of(path)}
    linear = {
        f"{block}.{path}".strip(".")
        for block in find_blocks(model, blocks)
        for path, module in module_at(model, block).named_modules()
        if isinstance(module, nn.Linear)
    }
    # Adapters find layers by the ends of their paths. A number alone may also be that of a block.
    return tuple(sorted({next((end for end in _ends_of(path) if end not in others), path) for path in linear} - {""}))


def _ends_of(path: str) -> list[str]:
    """All ends of a path, the shortest first: `c`, `b.c`, `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[at:]) for at in reversed(range(len(parts)))]


def _is_of_transformers(model: nn.Module) -> bool:
    """True if `peft` knows by itself which layers of a model are linear."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)
