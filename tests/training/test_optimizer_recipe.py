import pytest
import torch
from torch import nn

from tightfit.optim.by_name import moves_gradients, updates_on_host
from tightfit.training.config import TrainingConfig
from tightfit.training.optimizer import OptimizerRecipe, set_learning_rate


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def test_weight_decay_is_on_matrices_only():
    optimizer = OptimizerRecipe(TrainingConfig(weight_decay=0.3))(network().parameters())

    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}

    assert decays == {2: 0.3, 1: 0.0}


def test_frozen_parameters_are_left_out():
    model = network()
    model[0].weight.requires_grad_(False)

    optimizer = OptimizerRecipe(TrainingConfig())(model.parameters())

    assert [p.ndim for group in optimizer.param_groups for p in group["params"]] == [1, 1, 1]


def test_the_settings_reach_the_optimizer():
    training = TrainingConfig(learning_rate=0.02, betas=(0.5, 0.6), eps=1e-3)

    optimizer = OptimizerRecipe(training)(network().parameters())

    assert isinstance(optimizer, torch.optim.AdamW)
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.02, (0.5, 0.6), 1e-3)}


def test_the_other_optimizer_can_be_chosen():
    assert isinstance(OptimizerRecipe(TrainingConfig(optimizer="sgd"))(network().parameters()), torch.optim.SGD)


def test_the_learning_rate_of_every_group_is_set():
    optimizer = OptimizerRecipe(TrainingConfig())(network().parameters())

    set_learning_rate(optimizer, 0.125)

    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize(("name", "is_on_host"), [("offloaded_adamw", True), ("offloaded_adamw:0.5", False)])
def test_plans_know_that_a_trainings_optimizer_updates_on_the_host(name, is_on_host):
    recipe = OptimizerRecipe(TrainingConfig(optimizer=name))

    assert updates_on_host(recipe, on_card=True) == is_on_host
    assert moves_gradients(recipe)
    assert not moves_gradients(OptimizerRecipe(TrainingConfig()))
