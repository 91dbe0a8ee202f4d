import numpy as np
import pytest
import torch
import torch.nn.functional as F
from held_out import evaluation_loss

from tightfit.levers.chunked_loss import apply_chunked_loss
from tightfit.memory.allocator import measured_peak
from tightfit.models.decoder import Decoder, DecoderConfig
from tightfit.planner.api import plan
from tightfit.training.config import TrainingConfig
from tightfit.training.data.packing import PackedSamples
from tightfit.training.loop import resident_tensors
from tightfit.training.objective import CausalLMLoss, counted
from tightfit.training.optimizer import OptimizerRecipe

VOCABULARY = 300


def decoder(dropout: float = 0.0, vocabulary: int = VOCABULARY) -> Decoder:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": vocabulary}
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


@pytest.mark.keeps("evaluation-needs-more-memory")
@pytest.mark.sampled(1)
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


def test_under_a_chunked_loss_an_evaluation_computes_its_logits_in_chunks_too():
    """Whole, the logits of 8 samples and what a cross-entropy makes of them are most of the plain step."""
    model, batch = decoder(vocabulary=20_000), counted(samples(8).batch(range(8)))
    recipe = OptimizerRecipe(TrainingConfig())
    resident = resident_tensors(model, recipe(model.parameters()), batch)
    whole, chunked = [], []

    def evaluation(found: list[float | None]) -> None:
        found.append(evaluation_loss(model, samples(8), CausalLMLoss(), micro_batch_size=8))

    plain_peak = measured_peak(lambda: evaluation(whole), resident)
    with apply_chunked_loss(model, "head", 16):
        peak = measured_peak(lambda: evaluation(chunked), resident)
        with torch.no_grad():
            assert type(model(batch["input_ids"]).logits) is torch.Tensor

    held = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in resident}.values())
    assert peak - held < 0.2 * (plain_peak - held)
    assert chunked == pytest.approx(whole, rel=1e-6)
