"""The purpose of a training on rewards: what it has beside the model, and the peak of each of its phases."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tightfit.devices.present import Notice
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import CannotFit, ConfigError
from tightfit.memory.allocator import storage_bytes
from tightfit.models.adapters import is_adapted
from tightfit.models.generation import CHUNK_SIZE
from tightfit.models.generation_estimate import estimate_generation
from tightfit.planner.any_code.traced import trace
from tightfit.planner.request import role_of
from tightfit.runtime.users_code import object_named
from tightfit.tracing.build import build_dry
from tightfit.tracing.record import Category
from tightfit.tracing.surroundings import held_by
from tightfit.tracing.twin import unbacked_copy
from tightfit.training.config import Config
from tightfit.training.data.packing import BatchStream
from tightfit.training.data.prepare import PreparedData
from tightfit.training.data.prompts import PromptSamples, prepare_prompts
from tightfit.training.fitting import Fit, fit
from tightfit.training.objective import DRAWN, REFERENCE, Objective, counted
from tightfit.training.policy import PolicyLoss
from tightfit.training.purpose import Purpose, Running, objective_of
from tightfit.training.rewards import Function, demand_arguments
from tightfit.training.rollouts import (
    GENERATION,
    LOG_PROBS,
    UPDATE,
    Drawing,
    Rollouts,
    log_probs,
    rollout_from_file,
)
from tightfit.units import format_bytes

ROLLOUT = "rollout.safetensors"  # of a checkpoint
PHASES = (GENERATION, LOG_PROBS, UPDATE)
LEAST_CHUNK = 32  # tokens of a prompt that are read at once; fewer save little beside the cache


@dataclass
class GroupPolicy(Purpose):
    """A training on the rewards of completions that the model draws. Mutable: the reference, once the model is built;
    the predicted peaks, once the step is planned; the rollouts.
    """

    reference: nn.Module | None = field(default=None, repr=False)
    peaks: dict[str, int] = field(default_factory=dict)
    rollouts: Rollouts | None = field(default=None, repr=False)
    _reward: Function | None = None
    _drawing: Drawing | None = None

    name = "training.objective grpo"

    def data(self, config: Config, notice: Notice) -> PreparedData:
        name = config.training.reward
        assert name is not None, "the configuration has a reward"
        self._reward = reward = object_named(name, "training.reward", callable, "a function", ConfigError)
        found = prepare_prompts(config.data, config.model, config.training.groups)
        assert isinstance(found.training, PromptSamples), "prompts were read"
        demand_arguments(name, reward, list(found.training.columns))
        return found

    def begin(self, model: nn.Module, data: PreparedData, config: Config) -> None:
        self.prepare_reference(model, config)

    def prepare_reference(
        self, model: nn.Module, config: Config, copied: Callable[[nn.Module], nn.Module] = copy.deepcopy
    ) -> None:
        """Copy the model, where the loss compares with what it was and adapters cannot be switched off instead."""
        if config.training.groups.beta and not is_adapted(model):
            self.reference = copied(model).requires_grad_(False).eval()

    def loss(self, data: PreparedData, config: Config) -> Objective:
        return self.loss_of(config)

    def loss_of(self, config: Config) -> Objective:
        """The loss of an update, which holds the reference beside the model."""
        found = objective_of("grpo", config.training)
        assert isinstance(found, PolicyLoss), "of this objective"
        return found if self.reference is None else replace(found, modules_beside=(self.reference,))

    def planned(self, model: nn.Module, data: PreparedData, fitted: Fit, own: Config, device: DeviceSpec) -> str:
        """Predict the peak of each phase, and choose how many completions are drawn at once: as many as the budget has
        room for beside weights, reference and optimizer states. Raises `CannotFit` where that is not one.
        """
        samples = data.training
        assert isinstance(samples, PromptSamples), "prompts were read"
        self.predict_phases(model, samples, fitted, own, device)
        words = ", ".join(f"{name.replace('_', ' ')} {format_bytes(peak)}" for name, peak in self.peaks.items())
        at_once = f"{self.drawn_at_once} completions drawn at once"
        budget = fitted.whole_budget_bytes
        return f"predicted peaks: {words}; {at_once}" + ("" if budget is None else f"; budget {format_bytes(budget)}")

    def predict_phases(
        self, model: nn.Module, samples: PromptSamples, fitted: Fit, own: Config, device: DeviceSpec
    ) -> None:
        """Set the peaks of the phases, and how completions are drawn. Raises `CannotFit`."""
        role = role_of(device)
        # A backward leaves the workspace of its thread's handle of cuBLAS; what runs besides has its own.
        left = 0 if role is None else role.held_by_a_thread
        states = fitted.planned.by_category[str(Category.OPTIMIZER_STATE)] + left
        copied = 0 if self.reference is None else storage_bytes(held_by([self.reference]))
        budget = fitted.whole_budget_bytes
        limit = device.memory_bytes if budget is None else budget
        drawn = 0
        for drawing in _drawings(samples):
            drawn = _generation_peak(model, samples, drawing, own, device) + copied + states
            self._drawing = drawing
            if drawn <= limit:
                break
        assert self._drawing is not None, "there is a way to draw"
        if budget is not None and drawn > budget:
            raise CannotFit(
                f"{format_bytes(budget)} cannot fit: drawing one completion takes {format_bytes(drawn)} beside the "
                "optimizer states: raise memory.budget, or lower training.grpo.max_completion_tokens",
                drawn,
            )
        self.peaks = {GENERATION: drawn}
        beside = storage_bytes(held_by([model])) + copied + states
        if DRAWN in samples.fullest(1, 0) or REFERENCE in samples.fullest(1, 0):
            self.peaks[LOG_PROBS] = beside + self._weighing(model, samples, fitted, own, device)
        self.peaks[UPDATE] = fitted.peak_bytes

    def _weighing(self, model: nn.Module, samples: PromptSamples, fitted: Fit, own: Config, device: DeviceSpec) -> int:
        """Bytes that the log-probabilities of a micro-batch take beside weights."""
        training, found = own.training, []
        batch = samples.fullest(training.batch_size // fitted.micro_batches, int(samples.lengths.max()))
        part = {name: batch[name] for name in ("input_ids", "labels")}
        given = training.groups.temperature, training.precision
        with fitted.apply(model):
            for name, of in ((DRAWN, model), (REFERENCE, model if self.reference is None else self.reference)):
                if name in batch:
                    dry = trace(log_probs, of, part, *given, is_reference=name == REFERENCE, device=device)
                    found.append(dry.peak_bytes - storage_bytes(held_by([of])))
        return max(found)

    @property
    def drawn_at_once(self) -> int:
        """Completions that are drawn at once, once the phases are predicted."""
        assert self._drawing is not None, "there is a way to draw"
        return self._drawing.rows

    @property
    def predicted(self) -> Mapping[str, int]:
        return self.peaks

    @property
    def measured(self) -> Mapping[str, int]:
        return {} if self.rollouts is None else self.rollouts.measured

    def batches(self, stream: BatchStream, running: Running) -> Rollouts:
        samples, config = stream.samples, running.config
        assert isinstance(samples, PromptSamples), "prompts were read"
        assert self._reward is not None, "the data were read"
        assert self._drawing is not None, "the step was planned"
        assert config.training.reward is not None, "the configuration has a reward"
        self.rollouts = Rollouts(
            stream,
            samples,
            running.data.tokenizer,
            (config.training.reward, self._reward),
            running.stepper,
            self.reference,
            self._drawing,
            config.training.precision,
            config.training.seed,
            running.interrupt,
            running.note,
            running.steps,
            config.training.max_steps,
            position=stream.position,
        )
        if stream.position.repeat:
            assert running.checkpoint is not None, "a new training repeats nothing"
            self.rollouts.repeated, self.rollouts.reward_mean = rollout_from_file(running.checkpoint.read_file(ROLLOUT))
        return self.rollouts

    def files(self) -> Mapping[str, bytes]:
        content = None if self.rollouts is None else self.rollouts.to_file()
        return {} if content is None else {ROLLOUT: content}

    def to(self, device: str) -> None:
        if self.reference is not None:
            self.reference.to(device)

    def end(self, model: nn.Module) -> None:
        self.reference = None


@dataclass(frozen=True)
class PolicyPhases:
    """The predicted peak of each phase of a training on rewards, and how many completions are drawn at once."""

    peak_bytes: dict[str, int]
    drawn_at_once: int
    device: str
    device_bytes: int

    @property
    def highest_bytes(self) -> int:
        return max(self.peak_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def estimate_policy_phases(model: nn.Module, config: Config, device: DeviceSpec) -> PolicyPhases:
    """The phases of a training on rewards, from its configuration alone, for prompts of all the tokens that
    `data.sequence_length` leaves beside a completion. Nothing is run. Raises what planning the step raises.
    """
    settings = config.training.groups
    prompt = [0] * (config.data.sequence_length - settings.max_completion_tokens)
    samples = PromptSamples([""], [prompt], {}, 0, 0, settings)
    policy = GroupPolicy()
    policy.prepare_reference(model, config, lambda model: build_dry(lambda: unbacked_copy(model)))
    batch = counted(samples.fullest(config.training.batch_size, config.data.sequence_length))
    fitted = fit(model, batch, policy.loss_of(config), config, device)
    policy.predict_phases(model, samples, fitted, config, device)
    return PolicyPhases(policy.peaks, policy.drawn_at_once, device.name, device.memory_bytes)


def _drawings(samples: PromptSamples) -> list[Drawing]:
    """Ways to draw a group, the fastest first: pieces of prompts get shorter, then fewer completions at once."""
    longest, found = max(map(len, samples.ids)), []
    rows = samples.settings.group_size
    while rows:
        chunk = CHUNK_SIZE
        while chunk >= LEAST_CHUNK:
            if chunk == CHUNK_SIZE or chunk < longest:
                found.append(Drawing(rows, chunk))
            chunk //= 2
        rows //= 2
    return found


def _generation_peak(
    model: nn.Module, samples: PromptSamples, drawing: Drawing, own: Config, device: DeviceSpec
) -> int:
    """The peak of drawing completions of the full length for the longest prompt."""
    longest, settings = max(map(len, samples.ids)), samples.settings
    return estimate_generation(
        model,
        torch.full((drawing.rows, longest), samples.pad_id),
        new_tokens=settings.max_completion_tokens,
        precision=own.training.precision,
        device=device,
        chunk_size=drawing.chunk_size,
        temperature=settings.temperature,
    ).peak_bytes
