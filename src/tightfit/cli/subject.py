"""The subject of a question, built: a model, a batch, and how their step is computed."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import tightfit
from tightfit.cli import sources
from tightfit.cli.adapter import adapter_of
from tightfit.cli.question import LENGTH, NO_BUDGET, SIZE, Question
from tightfit.cli.waiting import say
from tightfit.devices.described import host_named, with_host
from tightfit.devices.present import lookup
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import BudgetError, InputError, ModelError, TightfitError, said_by
from tightfit.models.batches import batch_of, tokens
from tightfit.models.diffusion import denoising_batch, denoising_loss, is_denoiser
from tightfit.models.loading import build_model, without_weights
from tightfit.models.masks import put_masks, source_masks
from tightfit.models.pretrained import FLASH, OLDEST
from tightfit.models.quantised_record import refuse_quantised
from tightfit.names import optimizer_in_words
from tightfit.planner.api import describe_batch, estimate_asked, plan_asked
from tightfit.planner.estimates import Estimate
from tightfit.planner.plans import Plan
from tightfit.planner.request import Request
from tightfit.step import Batch, Precision
from tightfit.tracing.build import build_dry
from tightfit.training.api import purpose_of
from tightfit.training.config import Config, PretrainedModel, RecomputeConfig, load_config
from tightfit.training.data.prompts import completed
from tightfit.training.data.samples import two_documents
from tightfit.training.fitting import recompute_by_hand
from tightfit.training.objective import REFERENCE, counted
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.purpose import ObjectiveName, objective_of, refuse_teacher
from tightfit.verification import Verification, verify

PACKAGE = Path(tightfit.__file__).parent


@dataclass(frozen=True)
class Subject:
    """A question, built: its step, and the configuration that it names; answers the questions of the API about it."""

    name: str
    asked: Request
    question: Question
    config: Config | None = None

    @property
    def optimizer(self) -> str:
        """The optimizer by the name that the user knows."""
        given = self.question if self.config is None else self.config.training
        return optimizer_in_words(given.optimizer or "adamw", bool(given.step_in_backward))

    @property
    def budget(self) -> int | str | None:
        return self.question.budget if self.config is None else self.config.memory.budget

    @property
    def recompute(self) -> RecomputeConfig | None:
        """The recompute that CONFIG asks for by hand."""
        return None if self.config is None else self.config.memory.recompute

    @property
    def attention(self) -> str | None:
        """The attention by name, if it was named."""
        return self.question.attention if self.config is None else self.config.model.attention

    @property
    def model(self) -> nn.Module:
        return self.asked.model

    @property
    def batch(self) -> Batch:
        return self.asked.batch

    def estimate(self) -> Estimate:
        if self.asked.step.world_size is not None and self.recompute is not None:
            raise InputError(
                "memory.recompute is set by hand, and an estimate for several ranks is of the plain step: leave it out "
                "with memory.recompute=null"
            )
        with self.rejections(), self.recomputing():
            found = estimate_asked(self.asked.counted())
        return replace(found, optimizer=self.optimizer)

    def plan(self, budget: int | str, *, curve: bool = False) -> Plan:
        with self.rejections():
            found = plan_asked(self.asked, budget, curve=curve)
        return replace(found, optimizer=self.optimizer)

    def verify(self, plan: Plan) -> Verification:
        with self.rejections():
            return verify(self.model, self.batch, plan, loss=self.asked.loss)

    def recomputing(self) -> AbstractContextManager[Any]:
        """A context in which the recompute that CONFIG asks for by hand is applied."""
        return nullcontext() if self.recompute is None else recompute_by_hand(self.model, self.recompute)

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
            batch = describe_batch(self.batch)
            raise ModelError(f"{self.name} rejects the batch ({batch}): {said_by(error)}") from error


def budget_of(subject: Subject) -> int | str:
    """The budget that the subject is to be planned for. Raises `BudgetError` where it has none."""
    if subject.budget is None:
        raise BudgetError(NO_BUDGET)
    return subject.budget


def came_from(model: nn.Module, error: BaseException) -> bool:
    """True if an exception was raised below a forward of the model, and not by a line of ours."""
    modules = {id(module) for module in model.modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = any(id(frame.f_locals.get("self")) in modules for frame in frames)
    last = Path(frames[-1].f_code.co_filename)
    return inside and (not last.is_relative_to(PACKAGE) or last.is_relative_to(PACKAGE / "models"))


def subject_of(
    question: Question, *, dry: bool, inference: bool = False, notice: Callable[[str], None] = say
) -> Subject:
    """The subject of a question; a dry one has no weights. Quantised models are for `inference` only. `notice` is
    called with what is to be known of the device and of the host. Raises `InputError` and its like for what is wrong.
    """
    subject = built(question, dry=dry, inference=inference)
    device = lookup(subject.asked.step.device, notice=notice)  # said here, if its figures are rough
    if question.host is not None:
        subject = replace(subject, asked=in_host(subject.asked, question, device, notice))
    if subject.attention == FLASH:
        _demand_flash(device)
    return subject


def in_host(asked: Request, question: Question, device: DeviceSpec, notice: Callable[[str], None] = say) -> Request:
    """The step on a card in the machine of `--host`, whose rate is said; its memory is the budget if there is none."""
    assert question.host is not None, "the question has a --host"
    placed, memory = with_host(device, question.host), host_named(question.host).memory_bytes
    notice(placed.host_assumption)
    asked = asked.but(device=placed)
    return asked if memory is None or asked.host_budget is not None else asked.but(host_budget=memory)


def _demand_flash(device: DeviceSpec) -> None:
    """Raise `InputError` for a device on which flash-attention does not run."""
    if device.compute_capability is None or device.compute_capability < OLDEST:
        raise InputError(
            f"attention {FLASH} runs on cards of compute capability 8.0 and above (Ampere and later), not on "
            f"{device.name}: name one with --device, or take sdpa"
        )


def built(question: Question, *, dry: bool, inference: bool = False) -> Subject:
    """The same, without a look at the device."""
    if question.model is not None and not inference:
        refuse_quantised(question.model, f"--model {question.model!r}")
    return _from_config(question, dry) if question.config is not None else _from_model(question, dry, inference)


def _from_config(question: Question, dry: bool) -> Subject:
    """The step that `tightfit train` would run, with its loss and its optimizer."""
    assert question.config is not None, "the question has a CONFIG"
    config = load_config(question.config, question.settings)
    refuse_teacher(config, "a prediction")
    training = config.training
    model = _build(config, dry)
    batch, objective = _ids(model, config) if dry else _first_batch(config)
    return Subject(
        name=type(model).__name__,
        asked=Request.of(
            model=model,
            batch=counted(batch),
            loss=objective_of(objective, training),
            optimizer=OptimizerRecipe(training),
            precision=training.precision,
            device=None if training.device == "auto" else training.device,
            micro_batches=training.gradient_accumulation_steps,
            grad_clip=training.grad_clip,
            **_ranks(question),
            step_in_backward=training.step_in_backward,
            levers=config.memory.levers,
            blocks=question.blocks,
            offload_folder=config.memory.offload_folder,
            offload_budget=config.memory.offload_budget,
            host_budget=config.memory.host_budget,
            steps=training.max_steps,
        ),
        question=question,
        config=config,
    )


def _ids(model: nn.Module, config: Config) -> tuple[dict[str, Tensor], ObjectiveName]:
    """A batch of the right shape, without reading the corpus, and the objective as far as the configuration says it."""
    size, length = config.training.batch_size, config.data.sequence_length
    batch = tokens(model, size, length, "data.sequence_length").tensors()
    if config.data.packing != "none":
        batch["position_ids"] = two_documents(size, length)
    if config.training.objective == "dpo":
        batch[REFERENCE] = torch.zeros(size)
    if config.training.objective == "grpo":
        settings = config.training.groups
        most = settings.max_completion_tokens
        batch = completed([([0] * (length - most), [0] * most)] * size, settings, pad_id=0)
    return batch, config.training.objective


def _first_batch(config: Config) -> tuple[dict[str, Tensor], ObjectiveName]:
    """The batch that the training is planned for, and its objective."""
    data = purpose_of(config).data(config, say)
    return data.for_dry_runs(config.training.batch_size)[0], data.objective


def _build(config: Config, dry: bool) -> nn.Module:
    section = config.model
    # The file of a GGUF model is the only one that knows its shape.
    if not dry or (isinstance(section, PretrainedModel) and section.gguf_file is not None):
        model = build_model(section, seed=config.training.seed)
        put_masks(model, source_masks(section))
        return model
    bare = without_weights(section)
    model = build_dry(lambda: build_model(bare))
    put_masks(model, source_masks(section), dry=True)
    return model


def _from_model(question: Question, dry: bool, inference: bool) -> Subject:
    assert question.model is not None, "the question has a --model"
    model, batch = sources.build(question.model, dry=dry, held=_held(question, inference))
    loss = None
    if is_denoiser(model):
        batch = denoising_batch(model, question.batch_size or SIZE, question.image, question.seq_len)
        loss = denoising_loss(model)
    elif question.image is not None:
        raise InputError(
            f"--image {question.image} is for diffusion models, and {question.model} is none: leave it out"
        )
    if batch is None:
        batch = batch_of(model, question.batch_size or SIZE, question.seq_len, "--seq-len", otherwise=LENGTH)
    return Subject(
        name=f"{question.model} ({type(model).__name__})",
        asked=Request.of(
            model=model,
            batch=batch,
            loss=loss,
            optimizer=question.optimizer or "adamw",
            precision=cast(Precision, question.precision or "fp32"),  # checked with the other arguments
            device=question.device,
            micro_batches=1 if question.micro_batches is None else question.micro_batches,
            grad_clip=question.grad_clip,
            **_ranks(question),
            step_in_backward=bool(question.step_in_backward),
            levers=question.allowed,
            blocks=question.blocks,
            host_budget=question.host_budget,
        ),
        question=question,
    )


def _ranks(question: Question) -> dict[str, Any]:
    """The arguments about several ranks."""
    return {"world_size": question.world_size, "nodes": question.nodes, "parallel": question.parallel}


def _held(question: Question, inference: bool) -> sources.HeldAs:
    """How a --model is to be held."""
    adapter = None if question.adapter is None else adapter_of(question.adapter, question.base)
    return sources.HeldAs(question.dtype, adapter, question.attention, question.shape, as_published=inference)
