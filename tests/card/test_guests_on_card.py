"""Trainings of others on a card: their measured peak is the planned one, but for some numbers that they keep."""

import gc

import pytest
import torch
from tiny_trainings import llama, padded, samples

from tightfit.integrations.hf import FrugalTrainer
from tightfit.planner.separation import Coupled, refuse_coupled
from tightfit.step import TokenBatch, model_loss
from tiny import VOCABULARY, decoder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("values")
KEPT = 8192  # bytes: losses and counts, of 512 each


@pytest.fixture
def held_by_others():
    """Bytes of other tests' tensors. Blocks of their segments may be a little too large, and would count whole."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def settings_of(folder, accumulated=1):
    return {
        "model": llama(),
        "args": transformers.TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=32 // accumulated, bf16=True,
            gradient_accumulation_steps=accumulated, report_to=[], save_strategy="no", disable_tqdm=True,
        ),
        "train_dataset": samples(64, 64, 128),
        "data_collator": padded,
    }  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.keeps("cuda-path-pytorch-own")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_trainers_peak_is_the_planned_one_and_no_planned_batch_is_kept_on_the_card(
    tmp_path, accumulated, held_by_others
):
    trainer = FrugalTrainer(memory_budget="0.7x", **settings_of(tmp_path, accumulated))
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    plan, measured = trainer.memory_plan, torch.cuda.max_memory_allocated() - held_by_others
    assert measured <= plan.budget_bytes
    assert measured - plan.peak_bytes < KEPT


def test_samples_of_a_batch_on_the_host_are_tried_where_the_model_is():
    model, batch = decoder().cuda(), TokenBatch(4, 16, VOCABULARY).tensors()
    refuse_coupled(model, batch, model_loss)

    def coupled(model, batch):
        return model(**batch).logits.float().mean().square()

    with pytest.raises(Coupled, match="other gradients together"):
        refuse_coupled(model, batch, coupled)


class Anchored(FrugalTrainer):
    """Holds the model to a frozen one, as trl's DPO does to its reference."""

    def __init__(self, reference, **settings):
        super().__init__(**settings)
        self.reference = reference.to(self.args.device).requires_grad_(False)

    def compute_loss(self, model, inputs, **settings):
        with torch.no_grad():
            wanted = self.reference(**inputs).logits
        found = model(**inputs)
        return found.loss + (found.logits - wanted).square().mean()


@pytest.mark.keeps("cuda-path-pytorch-own")
def test_a_reference_model_that_the_trainer_holds_is_counted(tmp_path, held_by_others):
    trainer = Anchored(llama(), memory_budget="0.8x", **settings_of(tmp_path))
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    plan, measured = trainer.memory_plan, torch.cuda.max_memory_allocated() - held_by_others
    assert measured <= plan.budget_bytes
    assert measured - plan.peak_bytes < KEPT
