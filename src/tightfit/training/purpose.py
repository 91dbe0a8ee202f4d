"""The purpose of a training, where its data alone does not determine it: the seam through which distillation adds a
teacher.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from tightfit.devices.present import Notice
from tightfit.devices.spec import DeviceSpec
from tightfit.errors import ConfigError
from tightfit.training.checkpoint.stored import Checkpoint
from tightfit.training.config import Config
from tightfit.training.config.schema import TrainingConfig
from tightfit.training.data.packing import BatchStream
from tightfit.training.data.prepare import PreparedData, prepare_data
from tightfit.training.fitting import Fit
from tightfit.training.interrupt import Interrupt
from tightfit.training.objective import CausalLMLoss, Objective
from tightfit.training.policy import PolicyLoss
from tightfit.training.preferences import PreferenceLoss, unreferenced
from tightfit.training.reporter import Reporter
from tightfit.training.stepper import Stepper

ObjectiveName = Literal["auto", "causal", "sft", "dpo", "grpo"]


def refuse_teacher(config: Config, command: str) -> None:
    """Raise `ConfigError` where a configuration is that of a distillation: without its teacher it would be another
    training.
    """
    if config.distil is not None:
        raise ConfigError(
            f"distil is given, and {command} has no teacher: run tightfit distil (tightfit.distil), or leave the "
            "section out (distil=null)"
        )


@dataclass(frozen=True)
class Running:
    """A training whose steps are about to begin, after `steps` that a checkpoint has."""

    config: Config
    data: PreparedData
    stepper: Stepper
    interrupt: Interrupt
    note: Callable[[str], None]
    steps: int
    checkpoint: Checkpoint | None


class Purpose:
    """A training on its data and nothing else. A subclass may need more, such as another model.

    The methods are called in this order, each once but for the two losses and the files. `name` is what errors call
    one that needs more.
    """

    name = ""

    def data(self, config: Config, notice: Notice) -> PreparedData:
        """The samples. Raises `DataError` and `ConfigError`."""
        return plannable(prepare_data(config.data, config.model, objective=config.training.objective, notice=notice))

    def prepared(self, data: PreparedData, config: Config, device: DeviceSpec, reporter: Reporter) -> PreparedData:
        """The data with all that the batches need. Called before the model is built, so both need not fit at once."""
        return data

    @property
    def identity(self) -> Mapping[str, str]:
        """The inputs that a resumed training has to find unchanged, by names for an error: hashes of what is beside the
        data.
        """
        return {}

    def begin(self, model: nn.Module, data: PreparedData, config: Config) -> None:
        """Called when the model is built, on the CPU. It may get further modules, which `end` removes."""

    def loss(self, data: PreparedData, config: Config) -> Objective:
        """The loss that is minimised."""
        return objective_of(data.objective, config.training)

    def held_out_loss(self, data: PreparedData, config: Config) -> Objective:
        """The loss that is reported for the samples held out."""
        return self.loss(data, config)

    def planned(self, model: nn.Module, data: PreparedData, fitted: Fit, own: Config, device: DeviceSpec) -> str:
        """Called when the step is planned, with the model on the CPU and no lever on it; returns a line about it, or
        none. Raises `CannotFit`.
        """
        return ""

    @property
    def predicted(self) -> Mapping[str, int]:
        """The peaks of what runs besides the step, and of the step, by name."""
        return {}

    @property
    def measured(self) -> Mapping[str, int]:
        """The measured peaks of what ran besides the step, by name."""
        return {}

    def to(self, device: str) -> None:
        """Move what is beside the model to the device of the training, once the step is planned."""

    def batches(self, stream: BatchStream, running: Running) -> Iterator[dict[str, Tensor]]:
        """The batches of the steps."""
        return stream

    def files(self) -> Mapping[str, bytes]:
        """Further files of a checkpoint, by name."""
        return {}

    def end(self, model: nn.Module) -> None:
        """Called after the last step and its checkpoint, before the weights are written."""


def loss_of_step(purpose: Purpose, data: PreparedData, config: Config, *, is_sharded: bool) -> Objective:
    """The loss that a step minimises."""
    return _in_fp32(purpose.loss(data, config), config, is_sharded)


def loss_held_out(purpose: Purpose, data: PreparedData, config: Config, *, is_sharded: bool) -> Objective:
    """The loss that is reported for the samples held out."""
    return _in_fp32(purpose.held_out_loss(data, config), config, is_sharded)


def _in_fp32(loss: Objective, config: Config, is_sharded: bool) -> Objective:
    """FSDP2 casts weights and activations, and there is no autocast that would convert the logits."""
    is_cast = is_sharded and config.training.precision != "fp32"
    return replace(loss, in_fp32=True) if is_cast and isinstance(loss, CausalLMLoss) else loss


def objective_of(name: ObjectiveName, training: TrainingConfig) -> Objective:
    """The next token for texts and conversations, whose labels mark the answers; DPO for preference pairs, GRPO for
    prompts.
    """
    if name == "grpo":
        groups = training.groups
        return PolicyLoss(groups.clip_epsilon, groups.beta, groups.temperature)
    return PreferenceLoss(training.dpo_beta) if name == "dpo" else CausalLMLoss()


def plannable(data: PreparedData) -> PreparedData:
    """The data with batches of every field that the objective reads.

    A training is planned before the reference's log-probabilities are known; zeros stand for them.
    """
    if data.objective != "dpo":
        return data
    return replace(data, training=unreferenced(data.training), validation=unreferenced(data.validation))
