"""A recipe applied to the arguments of a plan: the same step as the recipe would train it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from tightfit.errors import ModelError
from tightfit.memory.allocator import scales_of, storage_bytes
from tightfit.models.diffusion import is_denoiser
from tightfit.models.dtypes import WEIGHT_DTYPES
from tightfit.models.variants import as_recipe
from tightfit.optim import step_in_backward
from tightfit.optim.by_name import build_optimizer
from tightfit.planner.request import Request
from tightfit.recipes.lines import remakes_optimizer
from tightfit.recipes.records import Autocast, Dtype, Recipe
from tightfit.runtime.nested import tensors_in
from tightfit.step import Batch, Optimizer, TokenBatch
from tightfit.tracing.surroundings import plain_tensors
from tightfit.training.config.schema import AdapterConfig

OptimizerOf = Callable[[Recipe], Optimizer]


class Variant(NamedTuple):
    """The settings shared by recipes whose forward and backward are the same."""

    dtype: Dtype
    adapter: AdapterConfig | None
    precision: Autocast
    frees_gradients: bool

    @classmethod
    def of(cls, recipe: Recipe) -> "Variant":
        return cls(recipe.dtype, recipe.adapter, recipe.precision, recipe.frees_gradients)


@dataclass
class Models:
    """The models of all variants, built once each. Mutable: those built so far."""

    model: nn.Module
    built: dict[tuple[Dtype, AdapterConfig | None], nn.Module] = field(default_factory=dict)

    def of(self, recipe: Recipe) -> nn.Module:
        """The model that a recipe trains, without memory. Raises `ModelError`."""
        key = (recipe.dtype, recipe.adapter)
        if key not in self.built:
            self.built[key] = self._made(recipe)
        return self.built[key]

    def _made(self, recipe: Recipe) -> nn.Module:
        adapter = recipe.adapter
        if adapter is None and all(p.dtype == WEIGHT_DTYPES[recipe.dtype] for p in self.model.parameters()):
            return self.model  # dry runs leave it as it is
        return as_recipe(self.model, dtype=recipe.dtype, adapter=adapter)


def optimizer_of(recipe: Recipe) -> Optimizer:
    """The recipe's optimizer as an argument of a plan."""
    if not recipe.step_in_backward:
        return recipe.optimizer

    def factory(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = list(parameters)
        return step_in_backward(build_optimizer(recipe.optimizer, trained), trained).optimizer

    return factory


def holds_fp32(batch: Batch) -> bool:
    """True if a batch holds numbers in fp32, which weights in 16 bits do not take without autocast."""
    return not isinstance(batch, TokenBatch) and any(t.dtype == torch.float32 for t in tensors_in(batch))


def with_recipe(asked: Request, recipe: Recipe, model: nn.Module, optimizer: OptimizerOf = optimizer_of) -> Request:
    """The arguments of a plan for the recipe. `model` is the recipe's own. Raises `ModelError`."""
    narrow = recipe.dtype == "bf16" and recipe.precision == "fp32"
    batch = asked.batch
    if narrow and model is not asked.model and holds_fp32(batch):
        if not (is_denoiser(model) and isinstance(batch, dict)):
            raise ModelError(
                "the batch holds numbers in fp32, which weights in bf16 do not take: use precision bf16 or fp32 weights"
            )
        batch = {name: value.to(torch.bfloat16) for name, value in batch.items()}  # as diffusers' scripts make them
    clip = None if recipe.step_in_backward else asked.step.grad_clip
    return asked.but(
        model=model,
        batch=batch,
        keep_gradients=asked.keep_gradients,  # of the model that trains now, which another one stands for
        optimizer=optimizer(recipe),
        precision=recipe.precision,
        grad_clip=clip,
        step_in_backward=recipe.step_in_backward,
    )


def changed_to(asked: Request, before: Recipe, recipe: Recipe, models: Models) -> Request:
    """The arguments of a plan for a step of the recipe `before` that becomes another one, with the user's own optimizer
    where that stays: the lines of the change do not make one. Raises `ModelError`.
    """
    same = (recipe.dtype, recipe.adapter) == (before.dtype, before.adapter)
    own = asked.optimizer
    # An optimizer that was made holds parameters of its own model. A factory makes one for any.
    stays = not remakes_optimizer(before, recipe) and (same or not isinstance(own, torch.optim.Optimizer))
    model = asked.model if same else models.of(recipe)
    asked = with_recipe(asked, recipe, model, lambda recipe: own if stays else recipe.optimizer)
    # peft calls the model under two modules of its own, so paths that the user named do not match any more.
    return asked.but(blocks=asked.blocks if recipe.adapter is None else None)


def without_optimizer(asked: Request, recipe: Recipe, model: nn.Module) -> Request:
    """The arguments for the recipe's forward and backward, which no optimizer follows."""
    return with_recipe(asked, recipe, model).but(optimizer="sgd", step_in_backward=False)


def held_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, buffers and scales."""
    parameters = list(model.parameters())
    scales = [scale for parameter in parameters for scale in scales_of(parameter)]
    return storage_bytes([*parameters, *model.buffers(), *plain_tensors(model), *scales])
