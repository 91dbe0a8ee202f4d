"""The subject of `fit`: the model below any adapters, and the configuration that a recipe is written into."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tightfit.cli.adapter import adapter_of
from tightfit.cli.question import LENGTH, LEVERS, SIZE, Question
from tightfit.cli.subject import budget_of, built, subject_of
from tightfit.cli.waiting import say
from tightfit.devices.present import lookup
from tightfit.errors import InputError
from tightfit.models.diffusion import is_denoiser
from tightfit.models.loading import build_model, vocabulary_size
from tightfit.planner.levers import Exactness
from tightfit.planner.refusal import Refusal
from tightfit.planner.request import Request
from tightfit.planner.search.search import Search
from tightfit.recipes.api import recipes_of
from tightfit.recipes.choices import Wanted
from tightfit.recipes.listed import Recipes
from tightfit.recipes.records import Outcome, Recipe
from tightfit.recipes.search import token_count
from tightfit.recipes.variants import Models, OptimizerOf, optimizer_of, with_recipe
from tightfit.recipes.written import YAML, WrittenSections, model_section, next_steps, written
from tightfit.step import Optimizer
from tightfit.tracing.build import build_dry
from tightfit.training.config import AdapterConfig, Config, PretrainedModel, load_config
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.purpose import refuse_teacher


@dataclass(frozen=True)
class RecipeSubject:
    """A question of `fit`, built."""

    question: Question
    asked: Request
    wanted: Wanted
    name: str
    budget: int | str | None
    setting: Callable[[], WrittenSections]
    optimizer: OptimizerOf = optimizer_of

    def recipes(self, notice: Callable[[str], None]) -> Recipes:
        # A command is alone in its process, so that it may fork.
        return recipes_of(
            self.asked,
            self.budget,
            self.wanted,
            optimizer=self.optimizer,
            notice=notice,
            name=self.name,
            processes=os.cpu_count() or 1,
        )

    def written(self, outcome: Outcome, as_: str = YAML) -> str:
        """The recipe as a configuration, or as a script for another library."""
        return written(outcome, self.setting(), as_)

    def next_steps(self, outcome: Outcome, path: Path, as_: str | None) -> list[str]:
        """The next steps with the recipe that was written to `path`, a line each."""
        return next_steps(str(path), outcome, self.setting(), as_ or YAML)

    def refusal(self, found: Recipes) -> Refusal:
        """The refusal of a question for which no recipe fits. On several cards it is the row that needs least."""
        asked = self.asked.but(optimizer=self.wanted.optimizer or "adamw")
        if self.asked.step.world_size is not None:
            row = min(found, key=lambda row: (-row.world_size, row.needed_bytes))
            model = Models(self.asked.model).of(row.recipe)
            asked = with_recipe(self.asked, row.recipe, model, self.optimizer)
            asked = asked.but(parallel=row.parallel)
        return Refusal(Search(asked.checked(may_choose=True), found.budget_bytes), recipes_tried=True)

    def planned_as(self, outcome: Outcome, path: Path) -> Outcome:
        """The outcome with the figures of the plan of the configuration that was written."""
        subject = subject_of(Question(config=str(path), device=self.question.device), dry=True)
        plan = subject.plan(budget_of(subject))
        tokens = token_count(self.asked.batch)
        rounding = [lever for lever in plan.levers if lever.exactness is not Exactness.EXACT]
        return replace(
            outcome,
            peak_bytes=plan.peak_bytes,
            needed_bytes=plan.peak_bytes,
            step_seconds=plan.step_seconds,
            host_seconds=plan.planned.host_seconds,
            device_seconds=plan.planned.device_seconds,
            tokens_per_second=tokens / plan.step_seconds if tokens and plan.step_seconds else None,
            levers=tuple(lever.name for lever in plan.levers),
            rounds=bool(rounding),
            plan=plan,
        )


def recipe_subject(question: Question) -> RecipeSubject:
    """The subject of a question of `fit`. Raises `InputError` and its like."""
    return _of_config(question) if question.config is not None else _of_model(question)


def _of_model(question: Question) -> RecipeSubject:
    source, attention = question.model, question.attention
    assert source is not None, "the question has a --model"
    wanted = _wanted(question, None if question.adapter is None else adapter_of(question.adapter, question.base))
    question = replace(question, dtype=None, adapter=None, base=None, step_in_backward=None)
    asked = _with_figures(built(question, dry=True).asked.but(levers=question.allowed or LEVERS))

    def setting() -> WrittenSections:
        if is_denoiser(asked.model):
            raise InputError(
                f"--model {source} is a diffusion model, which your own loop trains: no configuration can be written "
                "of its recipe, plan its step there with tightfit.plan"
            )
        return WrittenSections(
            model={**_section_of(source), **({} if attention is None else {"attention": attention})},
            device=question.device,
            budget=_budget(question.budget, asked),
            levers=question.allowed or LEVERS,
            batch_size=question.batch_size or SIZE,
            sequence_length=question.seq_len or LENGTH,
            grad_clip=question.grad_clip,
            vocabulary=vocabulary_size(asked.model),
        )

    return RecipeSubject(question, asked, wanted, source, question.budget, setting)


def _section_of(source: str) -> dict[str, Any]:
    if Path(source).suffix in (".yaml", ".yml"):
        return _dumped(load_config(source))["model"]
    return model_section(source)


def _of_config(question: Question) -> RecipeSubject:
    assert question.config is not None, "the question has a CONFIG"
    config = load_config(question.config, question.settings)
    refuse_teacher(config, "a prediction")
    training, section = config.training, config.model
    if isinstance(section, PretrainedModel) and section.gguf_file is not None:
        raise InputError(f"{question.config}: model.gguf_file cannot be asked about here: name the model's folder")
    adapter = section.adapter if isinstance(section, PretrainedModel) else None
    asked = built(question, dry=True).asked
    if isinstance(section, PretrainedModel):
        bare = section.model_copy(update={"adapter": None, "random_init": True, "dtype": "fp32"})
    else:
        bare = replace(section, dtype="fp32")
    levers = config.memory.levers or "exact"
    asked = asked.but(model=build_dry(lambda: build_model(bare)), levers=levers, step_in_backward=False)
    asked = _with_figures(asked)

    def optimizer(recipe: Recipe) -> Optimizer:
        keys = {"optimizer": recipe.optimizer, "step_in_backward": recipe.step_in_backward}
        return OptimizerRecipe(training.model_copy(update=keys))

    def setting() -> WrittenSections:
        sections = _dumped(config)
        return WrittenSections(
            model=sections["model"],
            sections=sections,
            device=question.device,
            budget=_budget(config.memory.budget, asked),
            levers=levers if isinstance(levers, str) else list(levers),
            batch_size=training.batch_size,
            sequence_length=config.data.sequence_length,
            grad_clip=training.grad_clip,
        )

    wanted = _wanted(question, adapter)
    budget = config.memory.budget
    return RecipeSubject(question, asked, wanted, question.config, budget, setting, optimizer)


def _dumped(config: Config) -> dict[str, Any]:
    """The keys that are not as they would be anyway."""
    found = config.model_dump(mode="json", exclude_defaults=True)
    return {**found, "model": found.get("model", {})}


def _with_figures(asked: Request) -> Request:
    """The arguments with the device's figures. If they are rough, a line says so."""
    return asked.but(device=lookup(asked.step.device, notice=say))


def _budget(budget: int | str | None, asked: Request) -> int | str:
    return budget if budget is not None else "100%" if asked.device.kind == "cuda" else "80%"


def _wanted(question: Question, adapter: AdapterConfig | None) -> Wanted:
    """The choices that options have settled. An adapter of a CONFIG settles its shape, and `--base` what it is on."""
    dtype: Any = None if question.dtype == "auto" else question.dtype
    return Wanted(
        dtype=dtype,
        adapter=adapter,
        base=question.base,
        optimizer=question.optimizer,
        precision=_precision(question),
        step_in_backward=question.step_in_backward or None,
        trains="adapters" if question.adapter is not None else "all" if dtype is not None else None,
    )


def _precision(question: Question) -> Any:
    known = ("fp32", "bf16", "fp16")
    if question.precision not in (None, *known):
        raise InputError(f"precision {question.precision!r} is not known: choose fp32, bf16 or fp16")
    return question.precision
