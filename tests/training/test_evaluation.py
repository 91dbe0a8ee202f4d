import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tightfit.config import TrainingConfig
from tightfit.data.packing import PackedSamples
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.planner.api import plan
from tightfit.training.evaluation import evaluation_loss
from tightfit.training.measure import resident_tensors
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe

VOCABULARY = 300


def decoder(dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return Decoder(DecoderConfig(**shape, max_position_embeddings=32, dropout=dropout))


def samples(count: int) -> PackedSamples:
    return PackedSamples(np.random.RandomState(0).randint(0, VOCABULARY, (count, 32)).astype(np.uint16))


@pytest.mark.parametrize("micro_batch_size", [1, 4, 7, 100])
def test_the_loss_is_the_mean_over_all_tokens_in_micro_batches_of_any_size(micro_batch_size: int):
    model, held_out = decoder(), samples(10)

    loss = evaluation_loss(model, held_out, CausalLMLoss(), micro_batch_size=micro_batch_size)

    ids = held_out.batch(range(10))["input_ids"]
    with torch.no_grad():
        truth = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert loss == pytest.approx(truth.item(), rel=1e-5)


def test_without_samples_there_is_no_loss():
    assert evaluation_loss(decoder(), samples(0), CausalLMLoss(), micro_batch_size=4) is None


def test_dropout_is_off_inside_and_on_again_afterwards():
    model, held_out = decoder(dropout=0.5), samples(4)

    losses = {evaluation_loss(model, held_out, CausalLMLoss(), micro_batch_size=4) for _ in range(2)}

    assert len(losses) == 1
    assert model.training
    assert model.layers[0].dropout.training


@pytest.mark.parametrize("levers", ["exact", "rounding"])
def test_an_evaluation_needs_no_more_memory_than_a_training_step(levers: str):
    model, batch = decoder(), counted(samples(8).batch(range(8)))
    recipe = OptimizerRecipe(TrainingConfig())
    planned = plan(model, batch, "0.6x", loss=CausalLMLoss(), optimizer=recipe, levers=levers, device="cpu")
    size = 8 // planned.micro_batches

    with planned.apply(model):
        peak = measured_peak(
            lambda: evaluation_loss(model, samples(24), CausalLMLoss(), micro_batch_size=size),
            resident_tensors(model, recipe(model.parameters()), batch),
        )

    states = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert peak + states <= planned.peak_bytes
