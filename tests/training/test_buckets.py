"""Batches of alike length, in as few micro-batches as their predicted bytes allow."""

import functools

import numpy as np
import pytest
import torch
from held_out import evaluation_loss
from packed_rows import VOCABULARY, decoder

from tightfit.devices.present import lookup_present
from tightfit.errors import CannotFit
from tightfit.memory.allocator import measured_peak
from tightfit.planner.search.candidates import UNSEEN_BYTES
from tightfit.step import StepSettings
from tightfit.training.buckets import Bucket, PredictedLength, sized
from tightfit.training.config import parse_config
from tightfit.training.data.prepare import PreparedData, arrange
from tightfit.training.data.store import TokenStore
from tightfit.training.data.tokenizer import train_tokenizer
from tightfit.training.fitting import fit
from tightfit.training.loop import resident_tensors
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe
from tightfit.training.stepper import Stepper

BATCH, LONGEST = 8, 32
LEVERS = {"none": {}, "plan": {"budget": "0.5x"}, "micro-batches": {"budget": "0.4x", "levers": ["micro_batch"]}}


def config_of(memory, *, auto=True, **data):
    accumulation = "auto" if memory and auto else 1
    return parse_config(
        {
            "data": {"sequence_length": LONGEST, "buckets": True, **data},
            "training": {"batch_size": BATCH, "device": "cpu", "gradient_accumulation_steps": accumulation},
            "memory": memory,
        }
    )


def data_of(config, count=56):
    """Documents of every length up to the longest, most of them short."""
    random = np.random.RandomState(0)
    lengths = np.minimum(1 + random.exponential(8, count).astype(int), LONGEST)
    lengths[-1] = LONGEST
    store = TokenStore.from_lists([random.randint(1, VOCABULARY, length) for length in lengths])
    parts = arrange(store, config.data, pad_id=0)
    return PreparedData(train_tokenizer(["a text"], 260), *parts, buckets=config.data.buckets)


@functools.cache
def fitted_for(name):
    """The fit of a decoder for the documents, which a test may share: nothing of it moves."""
    config = config_of(LEVERS[name])
    return fitted_of(config, data_of(config), decoder())


def fitted_of(config, data, model):
    longest, *shorter = [counted(batch) for batch in data.for_dry_runs(BATCH)]
    return fit(model, longest, CausalLMLoss(), config, lookup_present("cpu"), shorter)


@pytest.mark.slow  # an epoch in every length
@pytest.mark.keeps("batch-bucket-needs-more")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LEVERS)
def test_no_batch_of_an_epoch_is_over_its_prediction_and_none_over_the_budget(name):
    config, fitted = config_of(LEVERS[name]), fitted_for(name)
    model, data = decoder(), data_of(config)
    stream = data.batches(BATCH, seed=1)
    seen, tight = set(), 0

    with fitted.apply(model):
        optimizer, counts = OptimizerRecipe(config.training)(model.parameters()), fitted.micro_batches_for
        stepper = Stepper(model, optimizer, CausalLMLoss(), StepSettings(grad_clip=1.0), 1, micro_batches_for=counts)
        stepper.step(counted(next(stream)))  # the optimizer's states
        for _ in range(len(data.training) // BATCH):
            batch = counted(next(stream))
            length = batch["input_ids"].shape[1]
            peak = measured_peak(lambda: stepper.step(batch), resident_tensors(model, optimizer, batch))  # noqa: B023
            of_buckets = (each.peak_bytes for each in fitted.buckets if length <= each.length)
            predicted = next(of_buckets, fitted.planned.peak_bytes)
            assert peak <= predicted + UNSEEN_BYTES
            assert fitted.budget_bytes is None or predicted + UNSEEN_BYTES <= fitted.budget_bytes
            tight += peak > 0.9 * predicted
            seen.add(fitted.micro_batches_for(length))

    assert tight >= 3  # a prediction of everything would be over every batch, too
    assert max(seen) == fitted.micro_batches
    if name == "micro-batches":
        assert len(seen) > 1


@pytest.mark.slow  # a plan for each length
def test_a_shorter_length_never_has_more_micro_batches_than_a_longer_one():
    fitted = fitted_for("micro-batches")
    counts = [each.micro_batches for each in fitted.buckets]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == fitted.micro_batches
    assert [fitted.micro_batches_for(each.length) for each in fitted.buckets] == counts
    assert fitted.micro_batches_for(1) == counts[0]
    assert fitted.buckets[-1].length == LONGEST


@pytest.mark.slow  # two plans for each length
def test_one_micro_batch_fewer_would_not_fit():
    config, fitted, model = config_of(LEVERS["micro-batches"]), fitted_for("micro-batches"), decoder()
    data = data_of(config)
    for bucket in fitted.buckets[::2]:
        if bucket.micro_batches > 1:
            batch = counted(data.training.fullest(BATCH, bucket.length))
            fewer = BATCH // max(n for n in (1, 2, 4) if n < bucket.micro_batches)
            plain = parse_config({"training": {"batch_size": BATCH, "gradient_accumulation_steps": BATCH // fewer}})
            assert (
                fit(model, batch, CausalLMLoss(), plain, lookup_present("cpu")).planned.peak_bytes + 1024
                > fitted.budget_bytes
            )


@pytest.mark.slow  # a training for each number of micro-batches
def test_losses_and_gradients_do_not_depend_on_the_micro_batches_of_a_bucket():
    data, fitted, found = data_of(config_of({})), fitted_for("micro-batches"), []
    for counts in (None, fitted.micro_batches_for):
        model, stream = decoder(), data.batches(BATCH, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepper = Stepper(model, optimizer, CausalLMLoss(), StepSettings(), 1, micro_batches_for=counts)
        found.append([stepper.step(counted(next(stream))).loss for _ in range(6)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow  # a plan for each length
def test_held_out_documents_of_any_length_are_evaluated_within_the_prediction():
    config, fitted = config_of(LEVERS["plan"], validation_fraction=0.4), fitted_for("plan")
    model, data = decoder(), data_of(config)
    size = BATCH // fitted.micro_batches
    optimizer = OptimizerRecipe(config.training)(model.parameters())
    found = []
    with fitted.apply(model):
        peak = measured_peak(
            lambda: found.append(evaluation_loss(model, data.validation, CausalLMLoss(), micro_batch_size=size)),
            resident_tensors(model, optimizer, {}),
        )
    states = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert peak + states <= fitted.peak_bytes
    one_by_one = evaluation_loss(model, data.validation, CausalLMLoss(), micro_batch_size=1)
    assert found[0] == pytest.approx(one_by_one, rel=1e-5)


def test_padded_samples_without_buckets_are_planned_for_the_longest_batch():
    config = config_of({"budget": "0.5x"}, buckets=False)
    lengths = [4] * 30 + [LONGEST]
    store = TokenStore.from_lists(
        [np.arange(length) % VOCABULARY for length in lengths], [[True] * length for length in lengths],
        kind="conversations",
    )  # fmt: skip
    parts = arrange(store, config.data, pad_id=0)
    data = PreparedData(train_tokenizer(["a text"], 260), *parts)
    (batch,) = data.for_dry_runs(BATCH)
    assert batch["input_ids"].shape == (BATCH, LONGEST)


def test_a_length_takes_fewer_micro_batches_as_long_as_they_fit_and_more_where_it_must():
    needed = {10: 1, 20: 2, 30: 8, 40: 4}
    tried = []

    def run_dry(length, count):
        tried.append((length, count))
        return PredictedLength(1000 // count, fits=count >= needed[length])

    buckets = sized([10, 20, 30, 40], [1, 2, 4, 8], run_dry, Bucket(40, 4, 250))
    assert [(each.length, each.micro_batches) for each in buckets] == [(10, 1), (20, 2), (30, 8), (40, 4)]
    assert len(tried) == len(set(tried)) < 4 * 4


def test_a_length_that_fits_in_no_micro_batches_is_refused():
    with pytest.raises(CannotFit, match=r"batches of 10 tokens a row take .* set data\.buckets to false"):
        sized([10, 20], [1, 2], lambda length, count: PredictedLength(5000, fits=False), Bucket(20, 2, 100))
