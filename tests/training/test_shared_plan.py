"""What rank 0 hands to the others is what it has itself."""

from dataclasses import replace

import pytest
import torch
from tiny_training import settings

from made_up_devices import even
from tightfit.models.loading import build_model
from tightfit.ranks.processes.ranks import Ranks
from tightfit.step import StepSettings
from tightfit.training.config import parse_config
from tightfit.training.data.prepare import prepare_data
from tightfit.training.fitting import fit
from tightfit.training.objective import VALID_TOKENS, WHOLE_ROWS, CausalLMLoss, counted
from tightfit.training.random_states import random_states, seed_generators
from tightfit.training.several import config_of_a_rank, fit_as_json, fit_from_json, plan_digest
from tightfit.training.stepper import Stepper, share_of


class Four(Ranks):
    rank, size = 3, 4


@pytest.mark.slow  # a plan on each rank
def test_a_plan_is_the_same_on_every_rank(tmp_path):
    config = settings(tmp_path, model={"hidden_size": 16, "num_layers": 1}, memory={"budget": "0.7x"})
    data = prepare_data(config.data, config.model)
    model = build_model(config.model, seed=0)
    longest, *_ = [counted(batch) for batch in data.for_dry_runs(4)]
    fitted = fit(model, longest, CausalLMLoss(), config, even())
    found, is_stored = fit_from_json(fit_as_json(fitted, is_stored=True), config)
    assert is_stored
    assert found == fitted
    assert plan_digest(found) == plan_digest(fitted)
    assert plan_digest(replace(found, micro_batches=found.micro_batches + 1)) != plan_digest(fitted)


@pytest.mark.parametrize(
    ("batch", "count", "together", "expected"),
    [(8, 4, 1, (2, 1)), (9, 3, 1, (3, 1)), (16, 8, 1, (4, 2)), (2, 2, 1, (1, 1)), (8, 4, 2, (2, 1))],
)
def test_a_rank_has_its_share_in_micro_batches_of_the_same_size(batch, count, together, expected):
    config = parse_config({"training": {"batch_size": batch, "gradient_accumulation_steps": count}})
    own = config_of_a_rank(config, Four(), together).training
    assert (own.batch_size, own.gradient_accumulation_steps) == expected
    assert config_of_a_rank(config, Ranks(), together) is config


def test_ranks_draw_other_numbers_and_the_first_those_of_one_process():
    drawn = []
    for rank in (None, 0, 1, 2):
        seed_generators(7, *([] if rank is None else [rank]))
        drawn.append(random_states().tensors)
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    for name in ("random.cpu", "random.python", "random.numpy"):
        assert not torch.equal(drawn[1][name], drawn[2][name])
        assert not torch.equal(drawn[2][name], drawn[3][name])


def test_a_share_counts_the_whole_batch_and_holds_only_its_own_rows():
    model = torch.nn.Linear(2, 2)
    stepper = Stepper(model, torch.optim.SGD(model.parameters()), CausalLMLoss(), StepSettings(), 1, ranks=Four())
    ids = torch.arange(9 * 5).view(9, 5)
    labels = ids.clone()
    labels[:4] = -100
    part, tokens = share_of({"input_ids": ids, "labels": labels}, stepper)
    assert torch.equal(part["input_ids"], ids[6:9])  # the last of four has the longer share
    assert (part[VALID_TOKENS], part[WHOLE_ROWS], tokens) == (5 * 4, 9, 45)
    for name in ("input_ids", "labels"):
        assert part[name].untyped_storage().nbytes() == part[name].nbytes
