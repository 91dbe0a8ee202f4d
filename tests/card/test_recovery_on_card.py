"""A training goes on after PyTorch's own out of memory on a card, to the same bits."""

import random
from contextlib import nullcontext

import pytest
import torch
from recovering import Awkward, Remembered, batch, config, plain_fit, planner_of, training
from taken_memory import FullAt

pytestmark = pytest.mark.usefixtures("values")
STEPS, LENGTH = 2, 256  # so long that recompute pays beside cuBLAS's workspaces
ON_CARD = {"device": "cuda"}


def settings_of(precision="fp32", **training_section):
    return config(training={**ON_CARD, "precision": precision, **training_section})


def model_on_card():
    torch.manual_seed(0)
    return Awkward().cuda()


@pytest.fixture(scope="module", autouse=True)
def without_cudnn():
    """A dry run does not know cuDNN's batch norm."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def case(request):
    """Settings, the plain fit, a plan that recomputes and computes the same bits, and an uninterrupted training."""
    settings = settings_of(request.param)
    plain = plain_fit(settings, model_on_card(), LENGTH)
    model = model_on_card()
    recomputing = planner_of(model, settings).within(batch(1, LENGTH), plain.planned.peak_bytes - 1)
    assert recomputing.micro_batches == 1
    assert recomputing.plan.levers
    run = training(settings=settings, model=model_on_card())
    run.length = LENGTH
    counts = {}

    def around(number):
        counts[number] = FullAt()
        return counts[number]

    losses = run.run(STEPS, around)
    return settings, plain, recomputing, (losses, run.everything()), {n: mode.allocating for n, mode in counts.items()}


def recovers_at(case, step, number):
    """Memory runs out there, and the training goes on to the bits of one that had enough."""
    settings, plain, recomputing, (wanted_losses, wanted), _ = case
    run = training(Remembered([recomputing]), settings, plain, model_on_card())
    run.length = LENGTH
    mode = FullAt(number)
    losses = run.run(STEPS, lambda n: mode if n == step else nullcontext())
    assert mode.raised == len(run.notes) == 1, (step, number)
    assert losses == wanted_losses, (step, number)
    assert all(torch.equal(a, b) for a, b in zip(run.everything(), wanted, strict=True)), (step, number)


@pytest.mark.sampled(1)
@pytest.mark.keeps("cuda-path-too-card")
def test_a_card_that_is_full_at_some_operators_changes_no_bit(case):
    allocating = case[-1][2]
    assert len(allocating) > 60
    for number in (allocating[0], allocating[-1], *random.Random(1).sample(allocating, 4)):
        recovers_at(case, 2, number)


@pytest.mark.keeps("cuda-path-too-card")
@pytest.mark.slow  # some 800 trainings of two steps: minutes
@pytest.mark.parametrize("step", [1, 2])
def test_a_card_that_is_full_at_any_operator_changes_no_bit(step, case):
    for number in case[-1][step]:
        recovers_at(case, step, number)
