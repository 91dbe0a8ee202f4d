"""The recipes worth a look on a device, and the least bytes that each can need by arithmetic."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from torch import nn

from tightfit.devices.spec import DeviceSpec
from tightfit.names import (
    OPTIMIZERS,
    STEP_IN_BACKWARD_AND_CLIPPING,
    STEP_IN_BACKWARD_AND_SCALER,
    facts_of,
    parse_optimizer,
)
from tightfit.ranks.peaks import rows_of_rank
from tightfit.ranks.world import World
from tightfit.recipes.records import FEW_BITS, Autocast, Dtype, Recipe
from tightfit.training.config.schema import AdapterConfig

ADAPTER = AdapterConfig(r=16, alpha=32.0)  # on the layers that peft chooses
NO_ADAPTERS = "adapters are for models of `transformers`"
BF16_UNITS = (8, 0)  # compute capability of the first cards with products in bf16

PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}  # of bases
EXTRAS = {"peft": "hf", "bitsandbytes": "lowbit", "torchao": "lowbit"}  # of tightfit, by the package that it brings


@dataclass(frozen=True)
class Wanted:
    """The choices that a user has settled already. None, or empty, leaves it to the search."""

    dtype: Dtype | None = None
    adapter: AdapterConfig | None = None
    base: str | None = None
    optimizer: str | None = None
    precision: Autocast | None = None
    step_in_backward: bool | None = None
    trains: str | None = None  # `all` or `adapters`


def recipes_for(device: DeviceSpec, wanted: Wanted, *, may_adapt: bool, clips: bool = False) -> list[Recipe]:
    """The recipes to try here. `clips` says that gradients are clipped together, which a step in backward cannot do."""
    return installed(_every_recipe(device, wanted, may_adapt, clips))


def not_installed(device: DeviceSpec, wanted: Wanted, *, may_adapt: bool, clips: bool = False) -> tuple[str, ...]:
    """The extras that would bring further recipes, a sentence for each extra of tightfit that has packages which are
    not here.
    """
    missing = [missing_packages(recipe) for recipe in _every_recipe(device, wanted, may_adapt, clips)]
    found: dict[tuple[str, ...], tuple[int, set[str]]] = {}
    for packages in filter(None, missing):
        extras = tuple(sorted({EXTRAS[package] for package in packages}))
        count, names = found.get(extras, (0, set()))
        found[extras] = count + 1, names | set(packages)
    return tuple(
        f"{count} further recipe{'s' if count > 1 else ''} with {' and '.join(sorted(names))}: {install_line(extras)}"
        for extras, (count, names) in found.items()
    )


def needed_packages(recipe: Recipe) -> tuple[str, ...]:
    """The packages that a recipe needs beside those that tightfit always brings."""
    base = None if recipe.adapter is None else recipe.adapter.base
    needed = [*([] if base is None else ["peft", PACKAGES.get(base)]), facts_of(recipe.optimizer).package]
    return tuple(package for package in dict.fromkeys(needed) if package is not None)


def missing_packages(recipe: Recipe) -> tuple[str, ...]:
    """Those of them that are not installed."""
    return tuple(package for package in needed_packages(recipe) if find_spec(package) is None)


def installed(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes whose packages are all here."""
    return [recipe for recipe in recipes if not missing_packages(recipe)]


def install_line(extras: Sequence[str]) -> str:
    """The command that installs extras of tightfit."""
    return f"pip install 'tightfit[{','.join(extras)}]'"


def _every_recipe(device: DeviceSpec, wanted: Wanted, may_adapt: bool, clips: bool) -> list[Recipe]:
    """The recipes, those included whose packages are missing."""
    found = [*_full(device, wanted)] if wanted.trains != "adapters" else []
    if may_adapt and wanted.trains != "all":
        found += adapter_recipes(device, wanted)
    if wanted.step_in_backward is not None or clips:
        asked = bool(wanted.step_in_backward)
        found = [r for r in found if r.step_in_backward == asked and not (clips and asked)]
    return list(dict.fromkeys(found))


def why_none(wanted: Wanted, *, may_adapt: bool, clips: bool = False) -> str:
    """Why no recipe is left where no package is missing: which choices exclude each other, and what to do."""
    if wanted.trains == "adapters" and not may_adapt:
        return f"{NO_ADAPTERS}: train all weights"
    assert wanted.step_in_backward, "all other choices have a recipe"
    if clips:
        return STEP_IN_BACKWARD_AND_CLIPPING.refusal()
    if wanted.trains == "adapters":
        return "step_in_backward is tried where all weights are trained: leave it out, or the adapters"
    if wanted.precision == "fp16":
        return STEP_IN_BACKWARD_AND_SCALER.refusal()
    return f"{wanted.optimizer} updates no weight in backward: take another optimizer, or leave step_in_backward out"


def half_of(device: DeviceSpec) -> Autocast:
    """The 16-bit dtype of a device's products."""
    units = device.compute_capability
    return "bf16" if device.kind == "cpu" or (units is not None and units >= BF16_UNITS) else "fp16"


def _full(device: DeviceSpec, wanted: Wanted) -> Iterator[Recipe]:
    half = half_of(device)
    if wanted.dtype in (None, "fp32"):
        usual = ("fp32",) if device.kind == "cpu" else ("fp32", half)
        for precision in usual if wanted.precision is None else (wanted.precision,):
            yield from _with_optimizers(Recipe("fp32", precision=precision), device, wanted)
    if wanted.dtype == "bf16" or (wanted.dtype is None and half == "bf16"):
        yield from _with_optimizers(Recipe("bf16", precision=wanted.precision or "fp32"), device, wanted)


def _with_optimizers(recipe: Recipe, device: DeviceSpec, wanted: Wanted) -> Iterator[Recipe]:
    names = [name for name, facts in OPTIMIZERS.items() if recipe.dtype in facts.tried]
    for name in names if wanted.optimizer is None else (wanted.optimizer,):
        facts = facts_of(name)
        if wanted.optimizer is None and device.kind == "cpu" and not facts.tried_on_cpu:
            continue
        each = replace(recipe, optimizer=name)
        yield each
        if facts.steps_in_backward and recipe.precision != "fp16":
            yield replace(each, step_in_backward=True)


def adapter_recipes(device: DeviceSpec, wanted: Wanted) -> Iterator[Recipe]:
    """Adapters on each base, whether or not its packages are installed."""
    half = half_of(device)
    precision = wanted.precision or ("fp32" if device.kind == "cpu" else half)
    kept: Dtype = wanted.dtype or ("bf16" if precision == "bf16" else "fp32")
    # A base in fp32 under autocast costs twice the bytes of one in bf16 for the same products.
    usual = [base for base in ("fp32", "bf16", "int8", "nf4") if base != ("fp32" if precision == "bf16" else "bf16")]
    for base in usual if wanted.base is None else (wanted.base,):
        adapter = (wanted.adapter or ADAPTER).model_copy(update={"base": base})
        dtype: Dtype = kept if base in FEW_BITS else "bf16" if base == "bf16" else "fp32"
        yield Recipe(dtype, adapter, wanted.optimizer or "adamw_fused", precision=precision)


def least_state_bytes(recipe: Recipe, model: nn.Module) -> int:
    """The least bytes of states that the recipe's optimizer has on the device, by arithmetic."""
    optimizer = parse_optimizer(recipe.optimizer)
    of_fp32, of_bf16 = optimizer.facts.state_bytes
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum((of_bf16 if p.element_size() == 2 else of_fp32) * p.numel() for p in trained)
    if optimizer.fraction is not None:
        count = (1 - optimizer.fraction) * sum(8.0 * p.numel() for p in trained)
    return int(count)


def least_bytes(recipe: Recipe, model: nn.Module, held: int) -> int:
    """The least bytes that a step of the recipe can take: weights (`held`), states and gradients."""
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    gradients = max(trained, default=0) if recipe.frees_gradients else sum(trained)
    return held + gradients + least_state_bytes(recipe, model)


def least_bytes_of_rank(recipe: Recipe, model: nn.Module, world: World) -> int:
    """The least bytes of the first rank's weights, gradients and states, by arithmetic."""
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    whole = weights + trained + least_state_bytes(recipe, model)
    if world.parallel == "ddp":
        return whole + trained  # its buckets
    shares = [rows_of_rank(p.shape[0], world, 0) / p.shape[0] for p in model.parameters() if p.dim()]
    return int(min(shares, default=1.0) * whole)
