"""The subject of `fit`: the model below any adapters, and the configuration that a recipe is written into."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightfit.cli.adapter import adapter_of
from tightfit.cli.asking import planned
from tightfit.cli.question import LENGTH, LEVERS, SIZE, Question
from tightfit.cli.subject import Subject, built, in_host, subject_of
from tightfit.cli.waiting import say, unsaid
from tightfit.devices.present import lookup
from tightfit.errors import InputError
from tightfit.models.decoder import Decoder
from tightfit.models.loading import build_model, vocabulary_size
from tightfit.models.pretrained import trained_task
from tightfit.planner.request import Request
from tightfit.planner.search.fastest import Refusal
from tightfit.planner.search.search import Search
from tightfit.recipes.api import recipes_of
from tightfit.recipes.batches import token_count
from tightfit.recipes.choices import Wanted
from tightfit.recipes.records import Outcome, Recipe
from tightfit.recipes.table import Recipes
from tightfit.recipes.variants import Models, OptimizerOf, optimizer_of, with_recipe
from tightfit.recipes.written import YAML, WrittenSections, model_section, next_steps, written
from tightfit.step import Optimizer
from tightfit.tracing.build import build_dry
from tightfit.training.config import Config, PretrainedModel, load_config
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.purpose import refuse_teacher


def recipe_subject(question: Question) -> Subject:
    """The subject of a question of `fit`: the model below any adapters. Raises `InputError` and its like."""
    return _of_config(question) if question.config is not None else _of_model(question)


def recipes(subject: Subject, notice: Callable[[str], None]) -> Recipes:
    """The recipes for a subject. A command is alone in its process, so that it may fork."""
    return recipes_of(
        subject.asked,
        subject.budget,
        wanted(subject),
        optimizer=_optimizers(subject),
        notice=notice,
        name=subject.name,
        processes=os.cpu_count() or 1,
    )


def recipe_text(subject: Subject, outcome: Outcome, as_: str = YAML) -> str:
    """The recipe as a configuration, or as a script for another library."""
    return written(outcome, _sections(subject), as_)


def after_writing(subject: Subject, outcome: Outcome, path: Path, as_: str | None) -> list[str]:
    """The next steps with the recipe that was written to `path`, a line each."""
    return next_steps(str(path), outcome, _sections(subject), as_ or YAML)


def refusal(subject: Subject, found: Recipes) -> Refusal:
    """The refusal of a question for which no recipe fits. On several cards it is the row that needs least."""
    asked = subject.asked.but(optimizer=wanted(subject).optimizer or "adamw")
    if asked.step.world_size is not None:
        row = min(found, key=lambda row: (-row.world_size, row.needed_bytes))
        model = Models(asked.model).of(row.recipe)
        asked = with_recipe(subject.asked, row.recipe, model, _optimizers(subject)).but(parallel=row.parallel)
    return Refusal(Search(asked.checked(may_choose=True), found.budget_bytes), recipes_tried=True)


def planned_as(subject: Subject, outcome: Outcome, path: Path) -> Outcome:
    """The outcome with the figures of the plan of the configuration that was written."""
    written_down = Question(config=str(path), device=subject.question.device, host=subject.question.host)
    plan = planned(subject_of(written_down, dry=True, notice=unsaid))
    return replace(outcome.as_planned(plan, token_count(subject.asked.batch)), micro_batches=outcome.micro_batches)


def _of_model(question: Question) -> Subject:
    assert question.model is not None, "the question has a --model"
    below = replace(question, dtype=None, adapter=None, base=None, step_in_backward=None)
    asked = _with_figures(built(below, dry=True).asked.but(levers=question.allowed or LEVERS), question)
    return Subject(question.model, asked, question)


def _of_config(question: Question) -> Subject:
    assert question.config is not None, "the question has a CONFIG"
    config = load_config(question.config, question.settings)
    refuse_teacher(config, "a prediction")
    section = config.model
    if isinstance(section, PretrainedModel) and section.gguf_file is not None:
        raise InputError(f"{question.config}: model.gguf_file cannot be asked about here: name the model's folder")
    asked = built(question, dry=True).asked
    if isinstance(section, PretrainedModel):
        bare = section.model_copy(update={"adapter": None, "random_init": True, "dtype": "fp32"})
    else:
        bare = replace(section, dtype="fp32")
    levers = config.memory.levers or "exact"
    asked = asked.but(model=build_dry(lambda: build_model(bare)), levers=levers, step_in_backward=False)
    return Subject(question.config, _with_figures(asked, question), question, config)


def _optimizers(subject: Subject) -> OptimizerOf:
    """The function that makes the optimizer of a recipe: with the settings of CONFIG, where there is one."""
    if subject.config is None:
        return optimizer_of
    training = subject.config.training

    def optimizer(recipe: Recipe) -> Optimizer:
        keys = {"optimizer": recipe.optimizer, "step_in_backward": recipe.step_in_backward}
        return OptimizerRecipe(training.model_copy(update=keys))

    return optimizer


def _sections(subject: Subject) -> WrittenSections:
    """The configuration that a recipe is written into."""
    question, config, asked = subject.question, subject.config, subject.asked
    levers: Any = asked.levers_named
    budget = subject.budget or ("100%" if asked.device.kind == "cuda" else "80%")
    if config is not None:
        sections = _dumped(config)
        return WrittenSections(
            model=sections["model"],
            sections=sections,
            device=question.device,
            budget=budget,
            levers=levers if isinstance(levers, str) else list(levers),
            batch_size=config.training.batch_size,
            sequence_length=config.data.sequence_length,
            grad_clip=config.training.grad_clip,
        )
    assert question.model is not None, "the question has a --model"
    section = _section_of(question.model)
    task = "CausalLM" if isinstance(asked.model, Decoder) else trained_task(asked.model)
    if task is None:
        raise InputError(
            f"--model {question.model} is a {type(asked.model).__name__}, which your own loop trains: no configuration "
            "can be written of its recipe, plan its step there with tightfit.plan"
        )
    attention = {} if question.attention is None else {"attention": question.attention}
    return WrittenSections(
        model={**section, **attention},
        device=question.device,
        budget=budget,
        levers=levers,
        batch_size=question.batch_size or SIZE,
        sequence_length=question.seq_len or LENGTH,
        grad_clip=question.grad_clip,
        vocabulary=vocabulary_size(asked.model),
        is_causal=task == "CausalLM",
    )


def _section_of(source: str) -> dict[str, Any]:
    if Path(source).suffix in (".yaml", ".yml"):
        return _dumped(load_config(source))["model"]
    return model_section(source)


def _dumped(config: Config) -> dict[str, Any]:
    """The keys that are not as they would be anyway."""
    found = config.model_dump(mode="json", exclude_defaults=True)
    return {**found, "model": found.get("model", {})}


def _with_figures(asked: Request, question: Question) -> Request:
    """The arguments with the device's figures. If they are rough, a line says so."""
    device = lookup(asked.step.device, notice=say)
    return asked.but(device=device) if question.host is None else in_host(asked, question, device)


def wanted(subject: Subject) -> Wanted:
    """The choices that options have settled. An adapter of a CONFIG settles its shape, and `--base` what it is on."""
    question, config = subject.question, subject.config
    if config is not None:
        adapter = config.model.adapter if isinstance(config.model, PretrainedModel) else None
    else:
        adapter = None if question.adapter is None else adapter_of(question.adapter, question.base)
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
