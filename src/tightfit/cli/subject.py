"""What a question is about, built: a model, a batch, and how their step is computed."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from torch import nn

import tightfit
from tightfit.cli import sources
from tightfit.cli.question import Question
from tightfit.config import Config, PretrainedModel, load_config
from tightfit.devices.present import lookup
from tightfit.errors import InputError, ModelError, TightfitError
from tightfit.models.loading import build_model, position_limit, vocabulary_size
from tightfit.planner import api
from tightfit.planner.estimate import Estimate
from tightfit.planner.plan import Plan
from tightfit.step import Batch, Loss, TokenBatch
from tightfit.trace.build import build_dry
from tightfit.verify import Verification, verify

PACKAGE = Path(tightfit.__file__).parent
SIZE, LENGTH = 1, 1024  # of a batch, where the question gives none


@dataclass(frozen=True)
class Subject:
    """A model, a batch, and how their step is computed; answers the questions of the API about it."""

    name: str
    model: nn.Module
    batch: Batch
    step: dict[str, Any]  # optimizer, precision, device, micro_batches and grad_clip, as `tightfit.estimate` takes them
    loss: Loss | None = None
    budget: int | str | None = None
    levers: str | Sequence[str] | None = None
    blocks: str | None = None

    def estimate(self) -> Estimate:
        with self.rejections():
            return api.estimate(self.model, self.batch, loss=self.loss, **self.step)

    def plan(self, budget: int | str) -> Plan:
        with self.rejections():
            return api.plan(
                self.model, self.batch, budget, loss=self.loss, levers=self.levers, blocks=self.blocks, **self.step
            )

    def verify(self, plan: Plan) -> Verification:
        with self.rejections():
            return verify(self.model, self.batch, plan, loss=self.loss)

    @contextmanager
    def rejections(self) -> Iterator[None]:
        """An exception of the model's own, as one line that names the model and the batch."""
        try:
            yield
        except TightfitError:
            raise
        except Exception as error:
            if not came_from(self.model, error):
                raise
            batch = api.describe_batch(self.batch)
            raise ModelError(f"{self.name} rejects the batch ({batch}): {type(error).__name__}: {error}") from error


def came_from(model: nn.Module, error: BaseException) -> bool:
    """Whether an exception was raised below a forward of the model, and not by a line of ours."""
    modules = {id(module) for module in model.modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = any(id(frame.f_locals.get("self")) in modules for frame in frames)
    last = Path(frames[-1].f_code.co_filename)
    return inside and (not last.is_relative_to(PACKAGE) or last.is_relative_to(PACKAGE / "models"))


def subject_of(question: Question, *, dry: bool) -> Subject:
    """The subject of a question; a dry one has no weights. Raises `InputError` and its like for what is wrong."""
    subject = _from_config(question, dry) if question.config is not None else _from_model(question, dry)
    lookup(subject.step["device"], notice=lambda line: typer.echo(line, err=True))  # measured now, if ever
    return subject


def _from_config(question: Question, dry: bool) -> Subject:
    assert question.config is not None, "the question has a CONFIG"
    config = load_config(question.config, question.settings)
    model = _build(config, dry)
    training = config.training
    return Subject(
        name=type(model).__name__,
        model=model,
        batch=_tokens(model, training.batch_size, config.data.sequence_length, "data.sequence_length"),
        step={
            "optimizer": training.optimizer,
            "precision": training.precision,
            "device": None if training.device == "auto" else training.device,
            "micro_batches": training.gradient_accumulation_steps,
            "grad_clip": training.grad_clip,
        },
        budget=config.memory.budget,
        levers=config.memory.levers,
        blocks=question.blocks,
    )


def _build(config: Config, dry: bool) -> nn.Module:
    section = config.model
    # The file of a GGUF model is the only one that knows its shape.
    if not dry or (isinstance(section, PretrainedModel) and section.gguf_file is not None):
        return build_model(section, seed=config.training.seed)
    if isinstance(section, PretrainedModel):
        section = section.model_copy(update={"random_init": True})
    return build_dry(lambda: build_model(section))


def _from_model(question: Question, dry: bool) -> Subject:
    assert question.model is not None, "the question has a --model"
    model, batch = sources.build(question.model, dry=dry)
    if batch is None:
        batch = _tokens(model, question.batch_size or SIZE, question.seq_len or LENGTH, "--seq-len")
    return Subject(
        name=f"{question.model} ({type(model).__name__})",
        model=model,
        batch=batch,
        step={
            "optimizer": question.optimizer or "adamw",
            "precision": question.precision or "fp32",
            "device": question.device,
            "micro_batches": question.micro_batches or 1,
            "grad_clip": question.grad_clip,
        },
        budget=question.budget,
        levers=question.allowed,
        blocks=question.blocks,
    )


def _tokens(model: nn.Module, size: int, length: int, length_key: str) -> TokenBatch:
    """A batch of token ids that the model has embeddings and positions for."""
    name = type(model).__name__
    positions = position_limit(model)
    if positions is not None and length > positions:
        raise InputError(f"{length_key} {length} is longer than the {positions} positions of {name}: lower it")
    vocabulary = vocabulary_size(model) or _first_embedding(model)
    if vocabulary is None:
        raise ModelError(
            f"{name} has no embedding to make token ids for: let the function return (model, batch), the batch a dict "
            "or a tuple of tensors"
        )
    return TokenBatch(size, length, vocabulary)


def _first_embedding(model: nn.Module) -> int | None:
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
