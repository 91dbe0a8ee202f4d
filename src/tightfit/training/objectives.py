"""The objective of a training by its name, and the data as the objective needs it."""

from dataclasses import replace
from typing import Literal

from tightfit.training.config.schema import TrainingConfig
from tightfit.training.data.prepare import PreparedData
from tightfit.training.objective import CausalLMLoss, Objective
from tightfit.training.preferences import PreferenceLoss, unreferenced

ObjectiveName = Literal["auto", "causal", "sft", "dpo"]


def objective_of(name: ObjectiveName, training: TrainingConfig) -> Objective:
    """The next token for texts and conversations, whose labels mark the answers; DPO for preference pairs."""
    return PreferenceLoss(training.dpo_beta) if name == "dpo" else CausalLMLoss()


def plannable(data: PreparedData) -> PreparedData:
    """The data with batches of every field that the objective reads.

    A training is planned before the reference's log-probabilities are known; zeros stand for them.
    """
    if data.objective != "dpo":
        return data
    return replace(data, training=unreferenced(data.training), validation=unreferenced(data.validation))
